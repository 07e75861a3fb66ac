#!/usr/bin/env bash
# Type-check the project as it is when installed: proposers/ and adapters/ stand at the top level and
# are installed inside spec_plugins (see setup.cfg), which mypy cannot know. So it is shown a tree of links.
#
#   bash scripts/typecheck.sh path/to/mypy
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
mypy=$1
tree=$checkout/.mypy_cache/installed

rm -rf "$tree"
mkdir -p "$tree/spec_plugins"
ln -s "$checkout"/spec_plugins/* "$checkout/proposers" "$checkout/adapters" "$tree/spec_plugins/"
ln -s "$checkout"/scripts/*.py "$checkout"/examples/*/*/ "$tree/"
what=(-p spec_plugins)
for script in scripts/*.py; do
    what+=(-m "$(basename "$script" .py)")
done
for package in examples/*/*/__init__.py; do
    what+=(-p "$(basename "$(dirname "$package")")")
done
if [[ -e benchmarks/__init__.py ]]; then
    ln -s "$checkout/benchmarks" "$tree/"
    what+=(-p benchmarks)
fi

cd "$tree"
# Much of transformers has no annotations; calling it is no fault of the caller's.
"$mypy" --config-file "$checkout/pyproject.toml" --cache-dir "$checkout/.mypy_cache" \
    --untyped-calls-exclude transformers "${what[@]}"

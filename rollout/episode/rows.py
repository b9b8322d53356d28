"""Training rows from engine calls: the call tree of one rollout.

The prompts of a rollout's calls mostly extend each other. Training each call by itself would compute the same context
repeatedly, so calls form a tree, and every path from a root to a leaf becomes one row:

    parent of a call   the call whose `prompt + sampled` is the longest prefix of its prompt
    row                `prompt + sampled` of a leaf; the calls on its path are the sampled stretches inside it
    trained            a sampled token is trained in the first row that holds it, and is context in the others

A prompt that does not extend a call (reasoning stripped, history edited or summarized, another agent) is another root.
A prompt that ends inside an earlier generation does not merge with it. Tokens are never realigned or dropped.

The order of arrival does not matter: every permutation of the calls gives rows with the same ids, masks, logprobs,
versions and support, and the token ids decide which of several rows trains a shared stretch. Only `TrainingRow.turns`
(index of the call in the sequence given) and the order of the rows in the list follow the order of the calls.

Aborted calls (`FinishReason.ABORT`) are left out, as parents and as rows; where another call continues after their
tokens, these are context. Calls that sampled nothing make no row.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import EngineCall, FinishReason, SamplingSupport, TrainingRow


@dataclass(slots=True, eq=False)
class _Node:
    """Call in the tree."""

    call: EngineCall
    turn: int
    """Index of the call in the sequence given."""
    path: bytes = b""
    """`prompt + sampled`, 8 bytes a token, most significant first: bytes compare and nest as the token ids do. The
    first id of an image is a number of its digest (`ids_with_images`), since two images may have the same ids. Empty
    for the calls of `_single_path`, which are not compared."""
    parent: _Node | None = None
    children: list[_Node] = field(default_factory=list)
    is_trained: bool = False


def is_trainable(call: EngineCall) -> bool:
    """Return True if the sampled tokens of a call are trained. Over such calls, trained tokens == sampled tokens."""
    return call.finish_reason is not FinishReason.ABORT and len(call.sampled_ids) > 0


def rows_from_calls(calls: Sequence[EngineCall], *, rollout_id: int = 0, group_id: int = 0) -> list[TrainingRow]:
    """Make the training rows of one rollout from its calls in any order: one row per leaf of the call tree.

    Independent trees come in the order of their first calls; within a tree, a row that trains a shared stretch comes
    before the rows that hold the stretch as context. Time is linear in the total number of tokens, up to the logarithm
    of the number of calls in byte comparisons.

    Raises `EvidenceError` if some calls of a row have a sampling support and others do not (docs/tokens.md).
    """
    if (path := _single_path(calls)) is not None:
        return [_row(path[-1], path, rollout_id=rollout_id, group_id=group_id)]
    rows = []
    for leaf in _leaves(_call_tree(calls)):
        new_nodes = []
        node: _Node | None = leaf
        while node is not None and not node.is_trained:
            node.is_trained = True
            new_nodes.append(node)
            node = node.parent
        rows.append(_row(leaf, new_nodes[::-1], rollout_id=rollout_id, group_id=group_id))
    return rows


def extension_count(calls: Sequence[EngineCall]) -> int:
    """Count the calls that extend another call."""
    if (path := _single_path(calls)) is not None:
        return len(path) - 1
    return sum(node.parent is not None for node in _call_tree(calls))


def _single_path(calls: Sequence[EngineCall]) -> list[_Node] | None:
    """Return the nodes of a tree that is one path, in the order of the calls; None if it may be another tree.

    A prompt that stores all tokens of the call before it as shared (`PromptSharing`) was compared with them already.
    None with images, which a call that was read from a file may lack where its ids stand for them.
    """
    nodes = [_Node(call=call, turn=turn) for turn, call in enumerate(calls) if is_trainable(call)]
    for before, node in pairwise(nodes):
        prompt, parent = node.call.prompt, before.call
        if prompt.base is not parent or prompt.num_shared < len(parent.prompt) + len(parent.sampled_ids):
            return None
    return nodes if nodes and not any(node.call.images for node in nodes) else None


def _call_tree(calls: Sequence[EngineCall]) -> list[_Node]:
    """Link every trainable call to its parent; return them sorted by their ids, parents before children."""
    nodes = [
        _Node(call=call, turn=turn, path=_big_endian(call.state + call.sampled_ids))
        for turn, call in enumerate(calls)
        if is_trainable(call)
    ]
    nodes.sort(key=_content_key)

    # In sorted order every prefix of a path comes before it, and the prefixes of the current path form a stack.
    # Each path is compared once when it is kept and once when it is popped: linear in tokens.
    stack: list[_Node] = []
    lengths: list[int] = []
    for node in nodes:
        while stack and not node.path.startswith(stack[-1].path):
            stack.pop()
            lengths.pop()
        # A longer prefix than the prompt would cut into this call's own generation.
        depth = bisect_right(lengths, len(node.call.prompt))
        if depth:
            node.parent = stack[depth - 1]
            node.parent.children.append(node)
        stack.append(node)
        lengths.append(len(node.path) // 8)
    return nodes


def _content_key(node: _Node) -> tuple:
    """Return a sort key of the call's content, not its time, so that permutations give the same tree."""
    call = node.call
    return (
        node.path,
        len(call.prompt),
        call.sampled_logprobs,
        tuple(span.values for span in call.version_spans),
        call.finish_reason.value,
        b"" if call.support is None else call.support.offsets.tobytes() + call.support.token_ids.tobytes(),
    )


def _leaves(nodes: list[_Node]) -> Iterator[_Node]:
    """Walk the trees depth first, without recursion: an agent may take thousands of turns.

    The first child in content order comes first, since its row trains what the children share; the others follow in
    order of arrival.
    """
    stack = sorted((node for node in nodes if node.parent is None), key=lambda node: node.turn, reverse=True)
    while stack:
        node = stack.pop()
        if not node.children:
            yield node
            continue
        first, *others = node.children
        stack.extend(sorted(others, key=lambda child: child.turn, reverse=True))
        stack.append(first)


def _row(leaf: _Node, trained: Sequence[_Node], *, rollout_id: int, group_id: int) -> TrainingRow:
    ids = np.frombuffer(array("q", leaf.call.all_ids), dtype=np.int64)
    loss_mask = np.zeros(len(ids), dtype=bool)
    logprobs = np.zeros(len(ids), dtype=np.float32)
    versions = np.full(len(ids), -1, dtype=np.int32)
    turns = np.full(len(ids), -1, dtype=np.int32)
    for node in trained:
        start = len(node.call.prompt)
        sampled_slice = slice(start, start + len(node.call.sampled_ids))
        loss_mask[sampled_slice] = True
        logprobs[sampled_slice] = array("f", node.call.sampled_logprobs)  # an array is converted faster than a tuple
        turns[sampled_slice] = node.turn
        for span in node.call.version_spans:
            versions[start + span.start : start + span.end] = span.version
    return TrainingRow(
        ids=ids,
        loss_mask=loss_mask,
        sampling_logprobs=logprobs,
        versions=versions,
        turns=turns,
        rollout_id=rollout_id,
        group_id=group_id,
        support=_joined_support(trained),
        routes=_joined_routes(leaf),
        images=leaf.call.images,
    )


def _joined_support(trained: Sequence[_Node]) -> SamplingSupport | None:
    supports = [node.call.support for node in trained if node.call.support is not None]
    if not supports:
        return None
    if len(supports) != len(trained):
        without = [node.turn for node in trained if node.call.support is None]
        raise EvidenceError(
            f"sampling support: calls {without} have none, {len(supports)} other calls of the same row do; all calls "
            "of a rollout must be sampled with the same top_p, top_k and min_p, and the engine must return the support"
        )
    sizes = np.concatenate([np.diff(support.offsets) for support in supports])
    return SamplingSupport(
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        token_ids=np.concatenate([support.token_ids for support in supports]).astype(np.int32),
    )


def _joined_routes(leaf: _Node) -> np.ndarray | None:
    """Return the (tokens, layers, k) experts of a row, each from the first call on its path that computed the token.

    That call sampled the tokens after it, so their logprobs belong to these experts. No call computed the last token.
    """
    path, node = [], leaf
    while node is not None:
        path.append(node)
        node = node.parent
    parts, end = [], 0
    for node in reversed(path):
        if node.call.routes is not None:
            parts.append(node.call.routes.since(end))
            end = len(node.call.routes)
    return np.concatenate(parts) if parts and leaf.call.routes is not None else None


def _big_endian(ids: Sequence[int]) -> bytes:
    # numpy converts a tuple several times slower than array does.
    return np.frombuffer(array("q", ids), dtype=np.int64).astype(">i8").tobytes()

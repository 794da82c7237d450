"""The steps that need most of a device: their sequences alone, with no word on how a step is carried out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """What it is, the flags that make it smaller, and the cached and new tokens of each sequence: of those that decode
    first, then of those that verify drafts, then of prompts. Whether its rows sample with every feature, or none."""

    name: str
    flag: str
    contexts: Sequence[int]
    new: Sequence[int]
    num_decodes: int = 0
    num_verifies: int = 0
    sampling: bool = True


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest that a step may be."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    drafts: int = 0


def largest_steps(bounds: Bounds, decodes: Sequence[int]) -> Iterator[Step]:
    """What any step takes lies between these; `decodes` are the cached tokens of the largest batch's sequences."""
    seqs, tokens, length = bounds.max_num_seqs, bounds.max_num_batched_tokens, bounds.max_model_len
    chunk, most = min(tokens, length), min(tokens, seqs * length)
    full, many = _split(most, -(-most // chunk)), _split(most, seqs)
    last = min(chunk, length - 1)
    prompts = "--max-num-batched-tokens"
    yield Step(f"the largest prompt of one step ({chunk} tokens)", prompts, [0] * len(full), full)
    yield Step(f"{len(many)} prompts in one step", f"{prompts} or --max-num-seqs", [0] * len(many), many)
    batch = f"the largest batch ({seqs} sequences, up to {length} tokens)"
    yield Step(batch, "--max-num-seqs", decodes, [1] * seqs, seqs)
    yield Step(
        f"the end of the longest prompt ({length} tokens)", f"--max-model-len or {prompts}", [length - last], [last]
    )
    yield from _beside(bounds, "the largest batch", f"--max-model-len, {prompts}", decodes, [1] * seqs, 0)
    # Scratch of prompts may be as wide as the longest of them for each: the end of a long one among short ones.
    yield Step(
        f"{len(many)} prompts in one step, one of {length} tokens",
        f"--max-model-len, --max-num-seqs or {prompts}",
        [length - many[0], *[0] * (len(many) - 1)],
        many,
    )
    yield from _with_drafts(bounds, decodes)
    yield Step("a batch without sampling", "--max-num-seqs", decodes, [1] * seqs, seqs, sampling=False)


def _with_drafts(bounds: Bounds, decodes: Sequence[int]) -> Iterator[Step]:
    """The largest batch with as many drafts as there may be, alone and beside prompts.

    Drafts take half of a step's tokens at most.
    """
    seqs, drafts = bounds.max_num_seqs, bounds.drafts
    verifying = min(seqs, bounds.max_num_batched_tokens // 2 // drafts) if drafts else 0
    most = bounds.max_model_len - 1 - drafts
    if verifying and most > 0:
        name = f"the largest batch ({seqs} sequences) with {drafts} drafts for {verifying} of them"
        # The longest is among them.
        contexts = [min(context, most) if i >= seqs - verifying else context for i, context in enumerate(decodes[::-1])]
        new = [*[1] * (seqs - verifying), *[1 + drafts] * verifying]
        yield Step(name, "--draft or --max-num-seqs", contexts, new, seqs - verifying, verifying)
        yield from _beside(bounds, name, "--draft, --max-num-batched-tokens", contexts, new, verifying)


def _beside(
    bounds: Bounds, name: str, flags: str, contexts: Sequence[int], new: Sequence[int], verifying: int
) -> Iterator[Step]:
    """A batch, `verifying` at its end, in which prompts take the place of one sequence, and of as few as fill the step.

    What a step with more sequences and fewer tokens takes lies between the two.
    """
    seqs, length = len(new), bounds.max_model_len

    def with_prompts(count: int) -> tuple[int, list[int]]:
        """Sequences that stay, decodes left out first, and the prompts' tokens."""
        stay = seqs - count
        taken = stay + (new[-1] - 1) * min(verifying, stay)
        return stay, _split(max(min(bounds.max_num_batched_tokens - taken, count * length), 0), count)

    def full(count: int) -> bool:
        return count == seqs or sum(with_prompts(count)[1]) < count * length

    for count in dict.fromkeys([1, next(filter(full, range(1, seqs + 1)))]):
        stay, prompts = with_prompts(count)
        if stay and prompts:
            verifies = min(verifying, stay)
            what = "prompt" if len(prompts) == 1 else f"of {len(prompts)} prompts"
            yield Step(
                f"the end of the longest {what} ({length} tokens) beside {name}",
                f"{flags} or --max-num-seqs",
                [*contexts[seqs - stay :], length - prompts[0], *[0] * (len(prompts) - 1)],
                [*new[seqs - stay :], *prompts],
                stay - verifies,
                verifies,
            )


def _split(total: int, parts: int) -> list[int]:
    """`total` as `parts` numbers that differ by one at most, the larger ones first, those of zero left out."""
    return [n for i in range(parts) if (n := total // parts + (i < total % parts))]

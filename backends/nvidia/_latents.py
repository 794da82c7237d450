"""What the libraries' decode kernels want of a cache of latents."""

from __future__ import annotations

from k3hal.dispatch import Call
from k3hal.dispatch.library import unless

LATENT, ROPE = 512, 64


def mla_sizes(
    call: Call, pages: tuple[int, ...], kinds: tuple[str, ...], *, multiples: bool = False
) -> tuple[str | None, ...]:
    """What speaks against a call's sizes for kernels made for a latent of 512 and 64 more channels; with `multiples`
    pages may be so many times the last of `pages`."""
    latent, rope = call.dims.get("kv_lora", LATENT), call.dims.get("rope_dim", ROPE)
    page, kind = int(call.dims.get("page_tokens") or pages[0]), call.dims.get("kv_dtype", kinds[0])
    listed = f"{' or '.join(map(str, pages))}{' or a multiple' if multiples else ''}"
    return (
        unless((latent, rope) == (LATENT, ROPE), f"needs kv_lora 512 and rope_dim 64, these are {latent} and {rope}"),
        unless(page in pages or (multiples and page % pages[-1] == 0), f"needs page_tokens {listed}, this is {page}"),
        unless(kind in kinds, f"needs kv_dtype {' or '.join(kinds)}, this is {kind}"),
    )

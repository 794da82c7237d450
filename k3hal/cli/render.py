"""`k3hal render`: show the exact prompt a chat request becomes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from k3hal.cli.common import Json
from k3hal.cli.output import print_json
from k3hal.errors import InputError


def render(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A chat completion request body (JSON); - reads standard input.")
    ],
    tokenizer: Annotated[Path, typer.Option(metavar="DIR", help="Directory that holds tiktoken.model.")],
    as_json: Json = False,
) -> None:
    """Render a chat request to the prompt's text and token ids."""
    from k3hal.serve.chat_prompt import render_chat
    from k3hal.serve.media.images import Images
    from k3hal.tokenizer import Tokenizer

    prompt = render_chat(_read_body(file), images=Images())
    ids = prompt.ids(Tokenizer.from_dir(tokenizer))
    if as_json:
        print_json("k3hal.render/1", {"ids": ids, "text": prompt.text()})
    else:
        typer.echo(prompt.text())
        typer.echo(f"{len(ids)} tokens", err=True)


def _read_body(file: str) -> dict[str, Any]:
    source = "standard input" if file == "-" else file
    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        body = json.loads(text)
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{source} is not JSON: line {error.lineno} column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8, an integer of thousands of digits
        raise InputError(f"{source} is not readable JSON: {error}") from None
    if not isinstance(body, dict):
        raise InputError(f"{source} must hold a JSON object, the body of a chat completion request")
    return body

"""Where the base's hidden states come from: the model in process, a cache on disk, or a server.

All three are a `HiddenSource` (`mtp.teacher.source`), which is all that training asks for:

    source.batch_hidden(batch)   [B, T, H] after the final norm; batch has input_ids, lengths, rows
    source.embed(input_ids)      [B, T, H] input embeddings
    source.lm_head               [V, H]
    source.device, source.autocast()

`Teacher.load(base)` is the model in process, `CachedSource(cache, base, data, split="train")` reads
what `mtp data cache` wrote, `ServerSource(base, url, states)` asks a vLLM; `open_source` opens the
one that a recipe names. Only a `Teacher` can also continue a text, which evaluation needs
(`mtp.held_out`). A `Teacher` and a `ServerSource` can fill a cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graft.errors import UserError
from mtp.recipe import TeacherRecipe
from mtp.teacher.device import pick_device, pick_dtype
from mtp.teacher.in_process import Teacher
from mtp.teacher.source import HiddenSource

if TYPE_CHECKING:
    from mtp.teacher.server import ServerSource

__all__ = ["Teacher", "open_maker", "open_source", "pick_device", "pick_dtype"]


def open_source(settings: TeacherRecipe, base: Path, data: Path, *, device: str) -> HiddenSource:
    """What training takes its hidden states from.

    Raises:
        UserError: a broken base, a cache of another base or other data, a server that is not there.
    """
    if settings.cache_folder is not None:
        from mtp.teacher.cached import CachedSource

        return CachedSource(settings.cache_folder, base, data, device=device)
    if settings.kind == "server":
        from mtp.teacher.server import ServerSource

        return ServerSource(base, settings.url, Path(settings.states), device=device)
    return Teacher.load(base, device=device)


def open_maker(
    base: Path,
    *,
    device: str = "auto",
    server: str | None = None,
    server_states: Path | None = None,
) -> Teacher | ServerSource:
    """The base that computes hidden states: in process, or a vLLM server where one is named.

    Raises:
        UserError: a server without the folder it writes to, or the other way round.
    """
    if server is None and server_states is None:
        return Teacher.load(base, device=device)
    if server is None or server_states is None:
        raise UserError(
            "a server's URL and the folder that it writes to",
            "one without the other",
            "give both --server and --server-states, or neither",
        )
    from mtp.teacher.server import ServerSource

    return ServerSource(base, server, server_states, device=device)

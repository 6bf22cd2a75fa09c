"""Options of `mtp data prepare`, which has many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[
    list[str],
    typer.Option("--source", help="A file, a folder or hub:owner/name; may be repeated."),
]
MaxLength = Annotated[int, typer.Option("--max-length", help="Longest row, in tokens.")]
HeldOutPercent = Annotated[int, typer.Option("--held-out-percent", help="Conversations kept out.")]
MaxSkip = Annotated[
    float, typer.Option("--max-skip", help="Share of broken rows that fails the run.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the split.")]
Thinking = Annotated[str, typer.Option("--thinking", help="keep or strip, as it will be served.")]
AllowMissingTools = Annotated[
    bool, typer.Option("--allow-missing-tools", help="Take calls that have no tool schemas.")
]
Licence = Annotated[
    str,
    typer.Option("--licence", help="Licence of rows that record none; reaches the model card."),
]
FormatName = Annotated[str | None, typer.Option("--format", help="Read all rows by this format.")]
Mapping = Annotated[
    str | None,
    typer.Option("--map", help="Keys of pairs: prompt=KEY,response=KEY, or text=KEY."),
]
Where = Annotated[
    list[str] | None,
    typer.Option("--where", help="Keep rows with reward>=1, say; may be repeated."),
]
NearDuplicates = Annotated[
    str,
    typer.Option("--near-duplicates", help="together (on one side of the split), drop or ignore."),
]
Decontaminate = Annotated[
    list[Path] | None,
    typer.Option(
        "--decontaminate", help="An evaluation set whose text is left out; may be repeated."
    ),
]
Scan = Annotated[
    str | None,
    typer.Option("--scan", help="mask or drop keys, passwords, addresses; needs detect-secrets."),
]
Mix = Annotated[
    str | None,
    typer.Option("--mix", help="Weights by category or source: code=0.6,agent=0.4."),
]
Tokens = Annotated[
    int | None, typer.Option("--tokens", min=1, help="Budget of the mix, in tokens.")
]
MixRecipeFile = Annotated[
    Path | None, typer.Option("--recipe", help="TOML with [mix]; --mix and --tokens win.")
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Processes; all cores by default.")
]

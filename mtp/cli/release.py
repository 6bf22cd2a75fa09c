"""`mtp release`: a Hub-ready folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtp.cli.options import Base, Out, Overwrite

release_app = typer.Typer(no_args_is_help=True, help="A Hub-ready folder.")


@release_app.command("build")
def release_build(
    checkpoint: Annotated[Path, typer.Option(help="A grafted checkpoint.")],
    out: Out,
    name: Annotated[str, typer.Option(help="The model's name, as in the serve command.")],
    license_id: Annotated[str, typer.Option("--license", help="The Hub's licence identifier.")],
    license_file: Annotated[Path, typer.Option(help="Becomes LICENSE.")],
    evaluation: Annotated[
        Path | None, typer.Option(help="Report of `mtp eval` or `mtp quantize`.")
    ] = None,
    served: Annotated[Path | None, typer.Option(help="Report of `mtp probe`.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the base.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Assemble a Hub-ready folder with a model card. Nothing is uploaded.

    \b
    Example:
      mtp release build --checkpoint grafted --out release --name me/model \\
        --license mit --license-file LICENSE --evaluation eval.json
    """
    from mtp.release.assemble import build_release

    files = build_release(
        checkpoint,
        out,
        name=name,
        license_id=license_id,
        license_file=license_file,
        evaluation=evaluation,
        served=served,
        base_model=base_model,
        overwrite=overwrite,
    )
    print(f"{out}: {len(files)} files; look at {out / 'README.md'} before you upload it")


@release_app.command("draft")
def release_draft(
    draft: Annotated[Path, typer.Option(help="A DSpark draft's folder.")],
    base: Base,
    out: Out,
    name: Annotated[str, typer.Option(help="The draft's name, as in the serve command.")],
    base_name: Annotated[str, typer.Option(help="The base's name there, as on the Hub.")],
    license_id: Annotated[str, typer.Option("--license", help="The Hub's licence identifier.")],
    license_file: Annotated[Path, typer.Option(help="Becomes LICENSE.")],
    evaluation: Annotated[Path, typer.Option(help="Report of `mtp eval --draft`.")],
    served: Annotated[
        Path | None, typer.Option(help="Report of benchmarks/dspark_h200/table.py.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Assemble the folder of a DSpark draft, which is served beside its base.

    \b
    Example:
      mtp release draft --draft draft --base base --out release-draft \\
        --name me/draft --base-name me/model --license mit \\
        --license-file LICENSE --evaluation eval.json
    """
    from mtp.release.draft import build_draft_release

    files = build_draft_release(
        draft,
        base,
        out,
        name=name,
        base_name=base_name,
        license_id=license_id,
        license_file=license_file,
        evaluation=evaluation,
        served=served,
        overwrite=overwrite,
    )
    print(f"{out}: {len(files)} files; look at {out / 'README.md'} before you upload it")

"""`ngramspec warm-up`: compile what the engine runs, and check a model, before the first request waits for it."""

from __future__ import annotations

import time
from typing import Annotated, Any

from ngramspec.cli import common
from ngramspec.cli.environment import add_environment


def warm_up(
    model: Annotated[
        str | None,
        common.option(
            "Model",
            "Also do what this model's first start would do: a .gguf file, folder, hub name, or smollm2.",
            "--model",
            "-m",
        ),
    ] = None,
    portable: Annotated[
        bool,
        common.option(
            "Model",
            "Compile into the package for every processor of this level (x86-64-v3 or v4): for container images that run elsewhere.",
            "--portable",
        ),
    ] = False,
    quiet: Annotated[bool, common.option("Output", "Print no progress.", "--quiet", "-q")] = False,
) -> None:
    """Compile the engine for this processor now, so that the first start is as quick as later ones. Needed at most once per installation.

    Without this, the first start compiles while it works, and drafts begin when drafting is compiled.

    Examples:

      ngramspec warm-up

      ngramspec warm-up --model ./my-model.gguf

      ngramspec warm-up --portable
    """
    from ngramspec.cli import screen

    engine_settings: dict[str, Any] = {}
    if model is not None:
        add_environment(engine_settings, "warm-up")
        common.check_model(model)
    started = time.monotonic()
    with screen.show_progress(quiet) as progress:
        if portable:
            from ngramspec.datastore import bundled_code
            from ngramspec.engine.portable_code import compile_portable

            compile_portable(bundled_code.FOLDER, progress)
        else:
            from ngramspec.engine.background_compiler import compile_all

            compile_all(progress)
        if model is not None:
            common.open_engine(model, progress=progress, **engine_settings).close()
    if not quiet:
        print(f"ready after {common.format_duration(time.monotonic() - started)}")

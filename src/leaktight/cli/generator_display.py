"""The output of `leaktight generator train`."""

from __future__ import annotations

from rich.console import Console

from leaktight.api.generator import PlannedGenerator
from leaktight.cli.console import print_json, say
from leaktight.cli.display import progress_bars


def run(planned: PlannedGenerator, *, as_json: bool) -> None:
    """Train the generator with a bar of its epochs, and print its files and how to use them."""
    errors = Console(stderr=True)
    source = f"{planned.dataset.name}: {len(planned.public)} images of the test part, which no client holds"
    say(errors, source + (f"; {planned.left_out} that clients also hold are left out" if planned.left_out else ""))
    with progress_bars(errors, disable=not errors.is_terminal) as bars:
        task = bars.add_task("epochs", total=planned.epochs)

        def after_epoch(epoch: int, critic: float, generator: float) -> None:
            bars.update(task, completed=epoch, description=f"epochs, losses {critic:.2f} and {generator:.2f}")
            if not errors.is_terminal:
                say(errors, f"epoch {epoch} of {planned.epochs}: losses {critic:.3f} and {generator:.3f}")

        trained = planned.run(after_epoch)
    if as_json:
        files = {"file": str(trained.file), "samples": str(trained.samples), "seconds": trained.seconds}
        numbers = {"num_images": int(trained.notes["num_images"]), "seed": planned.seed}
        print_json({"schema_version": 1, **files, **trained.notes, **numbers})
        return
    console = Console()
    say(console, f"{trained.file}   samples: {trained.samples}   {trained.seconds:.0f} s")
    say(console, f'use it: --attack ggl --set \'attack.generator={{kind="dcgan", path="{trained.file}"}}\'')

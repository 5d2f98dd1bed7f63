"""What a person sees of `leaktight generator train`."""

from __future__ import annotations

from rich.console import Console

from leaktight.api.generator import PlannedGenerator
from leaktight.cli.console import print_json, say
from leaktight.cli.display import progress_bars


def run(planned: PlannedGenerator, *, as_json: bool) -> None:
    """Train the generator with a bar of its epochs, and say where it is and how to use it."""
    errors = Console(stderr=True)
    source = f"{planned.dataset.name}: {len(planned.public)} images of the test part, which no client holds"
    say(errors, source + (f"; {planned.left_out} that clients also hold are left out" if planned.left_out else ""))
    with progress_bars(errors, disable=not errors.is_terminal) as bars:
        task = bars.add_task("epochs", total=planned.epochs)

        def watch(epoch: int, critic: float, generator: float) -> None:
            bars.update(task, completed=epoch, description=f"epochs, losses {critic:.2f} and {generator:.2f}")
            if not errors.is_terminal:
                say(errors, f"epoch {epoch} of {planned.epochs}: losses {critic:.3f} and {generator:.3f}")

        made = planned.run(watch)
    if as_json:
        document = {"schema_version": 1, "file": str(made.file), "samples": str(made.samples), "seconds": made.seconds}
        numbers = {"num_images": int(made.notes["num_images"]), "seed": planned.seed}
        print_json({**document, **made.notes, **numbers})
        return
    console = Console()
    say(console, f"{made.file}   samples: {made.samples}   {made.seconds:.0f} s")
    say(console, f'use it: --attack ggl --set \'attack.generator={{kind="dcgan", path="{made.file}"}}\'')

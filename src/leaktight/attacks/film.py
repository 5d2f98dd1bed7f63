"""The guesses of a search as an animation."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.core.files import replace_atomically


@dataclass
class Recorder:
    """A progress callback that keeps all guesses: pass it to `reconstruct`, then `save` them as an animation."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    guesses: list[Tensor] = field(default_factory=list)

    def __call__(self, iteration: int, loss: float, guess: Tensor | None) -> None:
        self.losses.append((iteration, loss))
        if guess is not None:
            self.guesses.append(guess.detach().clone())

    def save(self, path: Path, *, zoom: int = 4, seconds: float = 4.0) -> None:
        """Write all guesses as an animated GIF or PNG, by the suffix of `path`; the last one is shown for 1.5 s.

        zoom: screen pixels for each pixel of an image. seconds: the length of the rest.
        """
        if not self.guesses:
            raise UsageError("expected reported guesses, got none; lower progress_every below the number of iterations")
        frames = [_sheet(guess, zoom) for guess in self.guesses]
        durations = [max(20, int(1000 * seconds / len(frames)))] * len(frames)
        durations[-1] = 1500
        save = partial(frames[0].save, save_all=True, append_images=frames[1:], duration=durations, loop=0)
        replace_atomically(path, save)


def _sheet(images: Tensor, zoom: int) -> Image.Image:
    """Images (N, C, H, W) side by side."""
    row = np.concatenate(list((images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()), axis=1)
    picture = Image.fromarray(row[..., 0] if row.shape[2] == 1 else row)
    return picture.resize((picture.width * zoom, picture.height * zoom), Image.Resampling.NEAREST)

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leaktight.core.kernels import first_derivatives_only
from leaktight.core.tasks import WordRecognition


def log_probabilities(count: int, steps: int, symbols: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, steps, symbols, generator=generator, dtype=torch.float64).log_softmax(2)


def merged(path: tuple[int, ...], blank: int) -> list[int]:
    return [symbol for symbol, _ in itertools.groupby(path) if symbol != blank]


def test_loss_by_hand() -> None:
    # Two steps, symbols a and b (0, 1) and blank (2); the word "a" is spelt by aa, a- and -a.
    probabilities = torch.tensor([[[0.5, 0.2, 0.3], [0.1, 0.3, 0.6]]], dtype=torch.float64)
    loss = WordRecognition(blank=2).loss(probabilities.log(), torch.tensor([[0, -1]]))
    assert loss.item() == pytest.approx(-math.log(0.5 * 0.1 + 0.5 * 0.6 + 0.3 * 0.1))


@pytest.mark.parametrize("word", [[], [0], [1, 1], [0, 1, 0], [2, 2, 1]])
def test_loss_is_the_sum_over_all_alignments(word: list[int]) -> None:
    blank, steps = 3, 5
    outputs = log_probabilities(1, steps, blank + 1)
    total = sum(
        math.exp(sum(float(outputs[0, step, symbol]) for step, symbol in enumerate(path)))
        for path in itertools.product(range(blank + 1), repeat=steps)
        if merged(path, blank) == word
    )
    targets = torch.tensor([word + [-1] * (4 - len(word))])
    assert WordRecognition(blank=blank).loss(outputs, targets).item() == pytest.approx(-math.log(total))


def test_loss_and_gradient_equal_pytorchs_own() -> None:
    outputs = log_probabilities(4, 9, 37).requires_grad_()
    targets = torch.tensor([[1, 2, 3, -1], [5, 5, 5, 5], [35, -1, -1, -1], [0, 1, 0, 1]])
    lengths = (targets >= 0).sum(1)
    ours = WordRecognition().loss(outputs, targets)
    theirs = F.ctc_loss(
        outputs.transpose(0, 1), targets.clamp(min=0), torch.full((4,), 9), lengths, blank=36, reduction="none"
    )
    torch.testing.assert_close(ours, theirs)
    # PyTorch's gradient assumes outputs of a log-softmax; compare through one.
    logits = torch.randn(4, 9, 37, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    ours_grad = torch.autograd.grad(WordRecognition().loss(logits.log_softmax(2), targets).sum(), logits)[0]
    losses = F.ctc_loss(
        logits.log_softmax(2).transpose(0, 1),
        targets.clamp(min=0),
        torch.full((4,), 9),
        lengths,
        blank=36,
        reduction="none",
    )
    torch.testing.assert_close(ours_grad, torch.autograd.grad(losses.sum(), logits)[0])


def test_the_quick_kernel_gives_the_same_loss_and_gradient() -> None:
    logits = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    # The second word needs a blank between its first two symbols and just fits; the third needs two and does not.
    targets = torch.tensor([[-1, -1, -1, -1], [0, 0, 1, -1], [0, 0, 1, 1], [4, 3, 2, 1], [2, -1, -1, -1]])
    task = WordRecognition(blank=5)

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        losses = task.loss(logits.log_softmax(2), targets)
        return losses, torch.autograd.grad(losses.sum(), logits)[0]

    plain = loss_and_gradient()
    with first_derivatives_only():
        quick = loss_and_gradient()
    torch.testing.assert_close(quick, plain)
    assert plain[0][2] == 0
    assert (plain[0][[0, 1, 3, 4]] > 0).all()


def test_loss_has_a_second_derivative() -> None:
    logits = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0, 1], [2, -1]])
    task = WordRecognition(blank=3)
    assert torch.autograd.gradgradcheck(lambda x: task.loss(x.log_softmax(2), targets), (logits,))


def test_a_word_that_does_not_fit_has_no_loss_and_no_gradient() -> None:
    outputs = log_probabilities(2, 3, 4).float().requires_grad_()
    # "aa" needs a blank between: three steps; "aab" needs four.
    losses = WordRecognition(blank=3).loss(outputs, torch.tensor([[0, 0, -1], [0, 0, 1]]))
    assert losses[0] > 0
    assert losses[1] == 0
    (gradient,) = torch.autograd.grad(losses.sum(), outputs)
    assert torch.isfinite(gradient).all()
    assert bool((gradient[1] == 0).all())


def test_loss_can_be_vectorised_over_examples() -> None:
    outputs, targets = log_probabilities(3, 6, 5), torch.tensor([[0, 1], [2, 2], [3, -1]])
    task = WordRecognition(blank=4)
    one_by_one = torch.vmap(lambda o, t: task.loss(o[None], t[None])[0])(outputs, targets)
    torch.testing.assert_close(one_by_one, task.loss(outputs, targets))


def spelt(paths: list[list[int]], symbols: int) -> Tensor:
    return F.one_hot(torch.tensor(paths), symbols).double().mul(5).log_softmax(2)


def test_decode_merges_repeats_and_drops_blanks() -> None:
    outputs = spelt([[0, 0, 3, 0, 1], [3, 3, 3, 3, 3], [2, 1, 2, 1, 2]], 4)
    expected = [[0, 0, 1, -1, -1], [-1] * 5, [2, 1, 2, 1, 2]]
    assert WordRecognition(blank=3).decode(outputs).tolist() == expected


@pytest.mark.parametrize("width", [3, 8])
def test_correct_compares_whole_words(width: int) -> None:
    outputs = spelt([[0, 0, 3, 0, 1]] * 3, 4)
    words = [[0, 0, 1], [0, 1], [0, 0]]
    targets = torch.tensor([word + [-1] * (width - len(word)) for word in words])
    assert WordRecognition(blank=3).correct(outputs, targets).tolist() == [True, False, False]

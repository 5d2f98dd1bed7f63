"""The network that reads words."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from leaktight.core.errors import ModelError
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tasks import WordRecognition
from leaktight.core.types import ImageShape
from leaktight.models import batch_statistics, build_model, check_fits
from leaktight.models.crnn import BidirectionalLstm, Crnn

WORD = ImageShape(3, 32, 100)


def small(shape: ImageShape) -> nn.Module:
    return batch_statistics(build_model(Crnn(units=8), shape, 36, rng=Rng(0)).double())


def images(count: int, shape: ImageShape) -> Tensor:
    return torch.rand(count, *shape, dtype=torch.float64, generator=Rng(1).torch())


def test_log_probabilities_per_column() -> None:
    model = build_model(Crnn(), WORD, 36, rng=Rng(0)).eval()
    outputs = model(torch.rand(2, *WORD, generator=Rng(1).torch()))
    assert outputs.shape == (2, 25, 37)
    torch.testing.assert_close(outputs.exp().sum(-1), torch.ones(2, 25))
    check_fits(model, WORD, 36, WordRecognition())
    with pytest.raises(ModelError, match="choose a model for this task"):
        check_fits(model, WORD, 36)


def test_lstm_is_pytorchs() -> None:
    ours = BidirectionalLstm(5, 4).double()
    theirs = nn.LSTM(5, 4, bidirectional=True, batch_first=True).double()
    with torch.no_grad():
        for direction, suffix in enumerate(("", "_reverse")):
            getattr(theirs, f"weight_ih_l0{suffix}").copy_(ours.weight_ih[direction])
            getattr(theirs, f"weight_hh_l0{suffix}").copy_(ours.weight_hh[direction])
            getattr(theirs, f"bias_ih_l0{suffix}").copy_(ours.bias[direction])
            getattr(theirs, f"bias_hh_l0{suffix}").zero_()
    inputs = torch.randn(3, 7, 5, dtype=torch.float64, generator=Rng(0).torch())
    torch.testing.assert_close(ours(inputs), theirs(inputs)[0])


def test_lstm_starts_as_in_keras() -> None:
    with global_seed(Rng(0)):
        layer = BidirectionalLstm(6, 4)
    assert torch.equal(layer.bias, torch.tensor([[0.0] * 4 + [1.0] * 4 + [0.0] * 8] * 2))
    for weight in layer.weight_hh.detach():
        torch.testing.assert_close(weight.T @ weight, torch.eye(4))


def test_second_derivatives_and_vmap() -> None:
    shape = ImageShape(1, 32, 16)
    model = small(shape)
    words = torch.tensor([[3, 5], [7, -1]])
    batches = torch.stack([images(2, shape), 1 - images(2, shape)])

    def slope(inputs: Tensor) -> Tensor:
        return torch.square(grad(lambda x: WordRecognition().loss(model(x), words).sum())(inputs)).sum()

    one_by_one = torch.stack([grad(slope)(batch) for batch in batches])
    assert one_by_one.abs().max() > 0
    torch.testing.assert_close(vmap(grad(slope))(batches), one_by_one)


def test_it_learns_two_words() -> None:
    shape = ImageShape(1, 32, 16)
    model = build_model(Crnn(units=16), shape, 36, rng=Rng(0))
    inputs = torch.rand(2, *shape, generator=Rng(2).torch())
    words, task = torch.tensor([[1, 2], [3, -1]]), WordRecognition()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(25):
        optimizer.zero_grad()
        task.loss(model(inputs), words).mean().backward()
        optimizer.step()
    assert task.correct(model(inputs), words).all()

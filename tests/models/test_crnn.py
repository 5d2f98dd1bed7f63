"""The network that reads words."""

from __future__ import annotations

import pytest
import torch
from tests.seeds import replayed
from torch import Tensor, nn
from torch.func import grad, vmap

from leaktight.core.errors import ModelError
from leaktight.core.inputs import Images
from leaktight.core.kernels import first_derivatives_only
from leaktight.core.rng import global_seed
from leaktight.core.tasks import WordRecognition
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch
from leaktight.fl.local import Trainer, loss_and_gradient
from leaktight.models.crnn import BidirectionalLstm, Crnn
from leaktight.models.initialise import build_model
from leaktight.models.source import check_fits
from leaktight.models.surgery import batch_statistics

WORD = Images(3, 32, 100)


def small(shape: Images) -> nn.Module:
    return batch_statistics(build_model(Crnn(units=8), shape, 36, rng=replayed(0)).double())


def images(count: int, shape: Images) -> Tensor:
    return torch.rand(count, *shape.shape, dtype=torch.float64, generator=replayed(1).public())


def test_log_probabilities_per_column() -> None:
    model = build_model(Crnn(), WORD, 36, rng=replayed(0)).eval()
    outputs = model(torch.rand(2, *WORD.shape, generator=replayed(1).public()))
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
    inputs = torch.randn(3, 7, 5, dtype=torch.float64, generator=replayed(0).public())
    torch.testing.assert_close(ours(inputs), theirs(inputs)[0])


def test_the_quick_kernel_gives_the_same_states_and_gradients() -> None:
    with global_seed(replayed(2)):
        layer = BidirectionalLstm(5, 4).double()
    inputs = torch.randn(3, 7, 5, dtype=torch.float64, generator=replayed(0).public())

    def states_and_gradients() -> list[Tensor]:
        states = layer(inputs)
        return [states, *torch.autograd.grad(torch.square(states).sum(), tuple(layer.parameters()))]

    plain = states_and_gradients()
    with first_derivatives_only():
        quick = states_and_gradients()
    torch.testing.assert_close(quick, plain)


def test_training_and_an_attackers_copy_of_it_agree() -> None:
    """Clients differentiate once, by PyTorch's kernels; who differentiates through training does it step by step."""
    shape = Images(1, 32, 16)
    trainer = Trainer(small(shape), LocalTraining(), WordRecognition())
    params, buffers = parameters_of(trainer.model), buffers_of(trainer.model)
    batch = Batch(images(2, shape), torch.tensor([[3, 5], [7, -1]]))
    once, twice = (
        loss_and_gradient(trainer, params, cloned(buffers), batch, create_graph=create_graph)
        for create_graph in (False, True)
    )
    torch.testing.assert_close(once, twice)


def test_the_width_scales_every_convolution() -> None:
    narrow, wide = (build_model(Crnn(width=width, units=8), WORD, 36, rng=replayed(0)) for width in (4, 8))
    channels = [
        [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)] for model in (narrow, wide)
    ]
    assert channels[0] == [4, 8, 16, 16, 32, 32, 32]
    assert channels[1] == [2 * number for number in channels[0]]
    with pytest.raises(ValueError, match="expected width >= 1, got 0"):
        Crnn(width=0)


def test_lstm_starts_as_in_keras() -> None:
    with global_seed(replayed(0)):
        layer = BidirectionalLstm(6, 4)
    assert torch.equal(layer.bias, torch.tensor([[0.0] * 4 + [1.0] * 4 + [0.0] * 8] * 2))
    for weight in layer.weight_hh.detach():
        torch.testing.assert_close(weight.T @ weight, torch.eye(4))


def test_second_derivatives_and_vmap() -> None:
    shape = Images(1, 32, 16)
    model = small(shape)
    words = torch.tensor([[3, 5], [7, -1]])
    batches = torch.stack([images(2, shape), 1 - images(2, shape)])

    def slope(inputs: Tensor) -> Tensor:
        return torch.square(grad(lambda x: WordRecognition().loss(model(x), words).sum())(inputs)).sum()

    one_by_one = torch.stack([grad(slope)(batch) for batch in batches])
    assert one_by_one.abs().max() > 0
    torch.testing.assert_close(vmap(grad(slope))(batches), one_by_one)


def test_it_learns_two_words() -> None:
    shape = Images(1, 32, 16)
    model = build_model(Crnn(units=16), shape, 36, rng=replayed(0))
    inputs = torch.rand(2, *shape.shape, generator=replayed(2).public())
    words, task = torch.tensor([[1, 2], [3, -1]]), WordRecognition()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(25):
        optimizer.zero_grad()
        task.loss(model(inputs), words).mean().backward()
        optimizer.step()
    assert task.correct(model(inputs), words).all()

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
from tests.seeds import replayed
from torch import nn
from torch.distributions import Normal, kl_divergence

from leaktight.core.errors import ModelError
from leaktight.core.inputs import Images
from leaktight.core.protocols import ClientFacts, Defense
from leaktight.core.rng import global_seed
from leaktight.core.tasks import Classification, Penalised, WordRecognition, example_losses
from leaktight.core.tensors import buffers_of, digest, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Broadcast, Examples
from leaktight.data.embedded import Digits
from leaktight.data.partition import Iid
from leaktight.defenses.precode import Precode
from leaktight.defenses.stack import Stack
from leaktight.engines.inprocess import run
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.client import Client, ClientRound
from leaktight.fl.federation import assemble
from leaktight.fl.local import Trainer, per_example_gradients
from leaktight.fl.messages import Train
from leaktight.fl.plan import FederationPlan, Setup
from leaktight.fl.protocol import RoundOutcome
from leaktight.models.crnn import Crnn
from leaktight.models.initialise import build_model
from leaktight.models.resnet import ResNet20
from leaktight.models.small import Cnn6, FeedForward, LeNetZhu, LogisticRegression, Mlp
from leaktight.models.source import ModelSource, check_fits
from leaktight.models.surgery import final_linear, representation

SHAPE = Images(1, 12, 12)
FACTS = ClientFacts("a", 24, 3)
SMALL = Precode(latent_size=5, penalty_weight=0.1)
LENET = LeNetZhu(activation="relu")


def prepared(source: ModelSource = LENET, defense: Defense = SMALL) -> nn.Module:
    return defense.prepare(build_model(source, SHAPE, 3, rng=replayed(0)), rng=replayed(1))


def examples() -> Examples:
    generator = replayed(2).public()
    images = torch.randint(256, (24, *SHAPE.shape), generator=generator, dtype=torch.uint8)
    return Examples(images, torch.randint(3, (24,), generator=generator))


def train(name: str = "a", defense: Defense = SMALL) -> ClientRound:
    model = prepared(defense=defense)
    trainer = Trainer(model, LocalTraining(batch_size=8, learning_rate=0.05), defense=defense)
    client = Client(name, examples(), examples(), Setup(trainer, FedAvg()), replayed(3).child(name))
    return client.train_round(Train(Broadcast(parameters_of(model), buffers_of(model), 0), 0.05), None)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_outputs_and_penalty_are_those_of_the_definition(mode: str) -> None:
    """The same noise, the layers written out, and PyTorch's own divergence of two normal distributions."""
    model = prepared().train(mode == "train")
    inputs = examples().batch().inputs
    with global_seed(replayed(7)):
        outputs = model(inputs)
    assert isinstance(outputs, Penalised)
    assert isinstance(model, FeedForward)
    features = model.features(inputs).flatten(1)
    tensors = parameters_of(model)
    at = "classifier.bottleneck"
    encoded = features @ tensors[f"{at}.encoder.weight"].T + tensors[f"{at}.encoder.bias"]
    mean, std = encoded[:, :5], torch.log1p(encoded[:, 5:].exp())
    with global_seed(replayed(7)):
        drawn = mean + std * torch.randn(24, 5)
    decoded = drawn @ tensors[f"{at}.decoder.weight"].T + tensors[f"{at}.decoder.bias"]
    expected = decoded @ tensors["classifier.linear.weight"].T + tensors["classifier.linear.bias"]
    torch.testing.assert_close(outputs.outputs, expected)
    bits = kl_divergence(Normal(mean, std), Normal(0.0, 1.0)).sum(1) / math.log(2)
    torch.testing.assert_close(outputs.penalty, 0.1 * bits)
    targets = examples().targets
    torch.testing.assert_close(
        example_losses(Classification(), outputs, targets),
        nn.functional.cross_entropy(expected, targets, reduction="none") + 0.1 * bits,
    )


def test_the_bottleneck_is_part_of_what_all_share() -> None:
    model = prepared()
    done = train()
    assert set(done.trained.update.tensors) == set(parameters_of(model))
    assert {name for name in done.trained.update.tensors if "bottleneck" in name} == {
        f"classifier.bottleneck.{layer}.{kind}" for layer in ("encoder", "decoder") for kind in ("weight", "bias")
    }
    assert all(float(tensor.abs().max()) > 0 for tensor in done.trained.update.tensors.values())
    assert done.state.params == {}


def test_the_noise_is_the_clients_own() -> None:
    """Two clients that take one step on the same examples would have the same loss but for it."""
    model = prepared()

    def loss(name: str, round_index: int) -> float:
        trainer = Trainer(model, LocalTraining(batch_size=24, learning_rate=0.05), defense=SMALL)
        client = Client(name, examples(), examples(), Setup(trainer, FedAvg()), replayed(3).child(name))
        request = Train(Broadcast(parameters_of(model), buffers_of(model), round_index), 0.05)
        return client.train_round(request, None).report["loss"]

    assert loss("a", 0) == loss("a", 0)
    assert abs(loss("a", 0) - loss("b", 0)) > 1e-5
    assert abs(loss("a", 0) - loss("a", 1)) > 1e-5
    generator = torch.get_rng_state()
    train()
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_last_layer_is_found_behind_the_bottleneck() -> None:
    model = prepared()
    name, layer = final_linear(model)
    assert (name, layer.out_features) == ("classifier.linear", 3)
    inputs = examples().batch().inputs
    with global_seed(replayed(7)):
        entered = representation(model, parameters_of(model), buffers_of(model), inputs)
    with global_seed(replayed(7)):
        outputs = model(inputs).outputs
    torch.testing.assert_close(layer(entered), outputs)


@pytest.mark.parametrize(
    ("source", "shape", "classes"),
    [
        (LENET, SHAPE, 3),
        (ResNet20(), SHAPE, 3),
        (Mlp(hidden=(8,)), SHAPE, 3),
        (LogisticRegression(), SHAPE, 3),
        (Cnn6(), Images(3, 32, 32), 2),
        (Crnn(units=8), Images(3, 32, 100), 36),
    ],
    ids=["lenet_zhu", "resnet20", "mlp", "logistic_regression", "cnn6", "crnn"],
)
def test_it_fits_networks_of_every_kind(source: ModelSource, shape: Images, classes: int) -> None:
    """Also where something follows the last linear layer, or where it reads one column after the other."""
    model = SMALL.prepare(build_model(source, shape, classes, rng=replayed(0)), rng=replayed(1))
    check_fits(model, shape, classes, WordRecognition() if isinstance(source, Crnn) else Classification())
    penalty = model(torch.rand(2, *shape.shape, generator=replayed(2).public())).penalty
    assert penalty.shape == (2,)
    assert bool((penalty > 0).all())


def test_a_model_that_is_one_layer() -> None:
    model = SMALL.prepare(nn.Linear(4, 3).double(), rng=replayed(1))
    outputs = model(torch.rand(2, 4, dtype=torch.float64))
    assert outputs.outputs.shape == (2, 3)


def test_copies_and_pickles_run_on_their_own() -> None:
    model = prepared()
    inputs = examples().batch().inputs
    model(inputs)  # leaves nothing behind that could not be copied
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.get_submodule("classifier.bottleneck.encoder").get_parameter("weight").mul_(3)
        with global_seed(replayed(7)):
            changed = other(inputs)
        with global_seed(replayed(7)):
            original = model(inputs)
        assert not torch.allclose(changed.penalty, original.penalty)


def test_every_example_has_noise_of_its_own_under_vmap() -> None:
    model = prepared()
    batch = examples().batch(torch.zeros(3, dtype=torch.long))
    with global_seed(replayed(7)):
        each = per_example_gradients(Trainer(model, LocalTraining()), parameters_of(model), buffers_of(model), batch)
    gradient = each["classifier.linear.weight"]
    assert gradient.shape == (3, 3, 12 * 9)
    assert not torch.allclose(gradient[0], gradient[1])


def test_what_it_cannot_wrap_is_a_named_error() -> None:
    with pytest.raises(ModelError, match="a model with a linear layer, got none"):
        SMALL.prepare(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()), rng=replayed(0))
    with pytest.raises(ModelError, match="let the defense prepare the model"):
        SMALL.start(build_model(LENET, SHAPE, 3, rng=replayed(0)), FACTS, rng=replayed(1))
    with pytest.raises(ValueError, match="latent_size >= 1, got 0"):
        Precode(latent_size=0)
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="penalty_weight >= 0"):
            Precode(penalty_weight=weight)


def test_a_federation_learns_through_it_and_scores_the_same_every_time() -> None:
    dataset = Digits().load(Path())
    plain = build_model(Mlp(hidden=(64,)), dataset.inputs, dataset.num_classes, rng=replayed(1))
    before = digest(plain.state_dict())
    federation = assemble(
        dataset,
        Iid(clients=3).split(dataset, rng=replayed(0)),
        plain,
        local=LocalTraining(epochs=2, batch_size=16, learning_rate=0.1),
        aggregator=FedAvg(),
        plan=FederationPlan(rounds=2, evaluate_every=2),
        defense=Stack(parts=(Precode(latent_size=32), Defense())),
        rng=replayed(2),
    )
    assert digest(plain.state_dict()) == before, "the model given is not changed"
    outcomes: list[RoundOutcome] = []
    for _ in range(2):
        final = run(federation, workers=1, after_round=lambda outcome, state: outcomes.append(outcome))
    last = outcomes[-1].score
    assert last is not None
    assert last == outcomes[1].score
    assert last.num_examples == len(dataset.test)
    assert last.accuracy > 0.6
    start = federation.first_state().server.params
    moved = {name for name, tensor in final.server.params.items() if not torch.equal(tensor, start[name])}
    assert "classifier.2.bottleneck.decoder.weight" in moved

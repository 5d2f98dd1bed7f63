"""The whole flow in one place: data, partition, clients, updates, server, and what an attacker sees of it.

Run it with `python examples/one_round.py`; it needs no download.
"""

from pathlib import Path

from leaktight.config.catalogue import MODELS
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.training import LocalTraining
from leaktight.core.types import RoundTrace
from leaktight.data.embedded import Digits
from leaktight.data.partition import Shards
from leaktight.engines import inprocess
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.federation import assemble
from leaktight.fl.plan import FederationPlan
from leaktight.models.initialise import build_model


def main() -> None:
    rng = Rng.fresh()
    dataset = Digits().load(Path())
    partition = Shards(clients=20, shards_per_client=2).split(dataset, rng=rng.child("partition"))
    model = build_model(
        MODELS["lenet_zhu"](), dataset.inputs, dataset.num_classes, init="default", rng=rng.child("model")
    )
    federation = assemble(
        dataset,
        partition,
        model,
        local=LocalTraining(samples=4, batch_size=2, learning_rate=0.05),
        aggregator=FedAvg(),
        plan=FederationPlan(rounds=1, per_round=3),
        rng=rng.child("federation"),
    )

    traces: list[RoundTrace] = []
    inprocess.run(federation, workers=1, record=traces.append)
    (trace,) = traces
    target = next(iter(trace.clients))
    print("clients of the round:", ", ".join(trace.clients))
    print("truth, for the judge only:", tuple(trace.clients[target].truth.examples.inputs.shape))

    curious = ThreatModel(knows=frozenset({Knowledge.BATCH_SIZE}))
    seen = curious.observe(trace, target)
    print("the attacker's update:", {name: tuple(tensor.shape) for name, tensor in seen.update.tensors.items()})
    print("batch size:", seen.batch_size, "  labels:", seen.labels, "  local training:", seen.local_training)


if __name__ == "__main__":
    main()

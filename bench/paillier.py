"""Packed Paillier beside `phe`, value by value: 100 000 parameters, 10 clients, 2048 bits, the same machine.

`phe` is timed on a sample of values and the rest is computed from it: it would take hours. Both sides encrypt the
updates of all clients, add them up and decrypt the sum. Key generation is left out; the table of the packed side is
made within the time measured. One run: the factor is so large that its spread does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import phe

from leaktight.core.rng import Rng
from leaktight.crypto.cipher import Keys, Sealed, Values
from leaktight.crypto.paillier import Paillier
from leaktight.crypto.paillier_keys import SecretKey
from leaktight.runtime.processes import available_cores

VALUES, CLIENTS, SAMPLE = 100_000, 10, 20


@dataclass(frozen=True)
class Cost:
    """Seconds for all values of all clients, and the bytes of one client's update."""

    encrypt: float
    add: float
    decrypt: float
    size: float

    @property
    def seconds(self) -> float:
        return self.encrypt + self.add + self.decrypt


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def packed(key: SecretKey, workers: int) -> Cost:
    cipher = Paillier()
    keys = Keys(key.public.to_bytes(), key.to_bytes())
    updates = [Rng(seed).public_numpy().normal(0, 0.05, VALUES) for seed in range(CLIENTS)]
    sealed: list[Sealed] = []
    encrypt = seconds(
        lambda: sealed.extend(cipher.encrypt(update, keys, rng=Rng.fresh(), workers=workers) for update in updates)
    )
    total: list[Sealed] = []
    add = seconds(lambda: total.append(cipher.combine(sealed, [1] * CLIENTS, keys.public)))
    means: list[Values] = []
    decrypt = seconds(lambda: means.append(cipher.decrypt(total[0], keys.secret)))
    error = float(np.abs(means[0] - np.mean(updates, axis=0)).max())
    assert error <= cipher.resolution, error
    return Cost(encrypt, add, decrypt, len(sealed[0].body))


def one_by_one(key: SecretKey) -> Cost:
    public = phe.PaillierPublicKey(key.public.n)
    private = phe.PaillierPrivateKey(public, key.p, key.q)
    values = Rng(0).public_numpy().normal(0, 0.05, SAMPLE).tolist()
    numbers: list[phe.EncryptedNumber] = []
    encrypt = seconds(lambda: numbers.extend(public.encrypt(value) for value in values)) / SAMPLE
    sums: list[phe.EncryptedNumber] = []
    add = seconds(lambda: sums.extend(number + number for number in numbers)) / SAMPLE
    decrypt = seconds(lambda: [private.decrypt(number) for number in sums]) / SAMPLE
    size = (numbers[0].ciphertext(be_secure=False).bit_length() + 7) // 8
    return Cost(encrypt * VALUES * CLIENTS, add * VALUES * (CLIENTS - 1), decrypt * VALUES, size * VALUES)


def main() -> None:
    key = SecretKey.generate(2048, rng=Rng.fresh())
    theirs = one_by_one(key)
    print(f"{VALUES} values, {CLIENTS} clients, 2048 bits; phe computed from {SAMPLE} values")
    print(f"{'':>18} {'encrypt':>10} {'add':>9} {'decrypt':>9} {'all':>10} {'times':>7} {'MB':>7} {'smaller':>8}")
    rows = {"phe": theirs, "packed": packed(key, 1)}
    if available_cores() > 1:
        rows[f"packed, {available_cores()} processes"] = packed(key, available_cores())
    for name, cost in rows.items():
        print(
            f"{name:>18} {cost.encrypt:8.1f} s {cost.add:7.1f} s {cost.decrypt:7.1f} s {cost.seconds:8.1f} s "
            f"{theirs.seconds / cost.seconds:7.0f} {cost.size / 1e6:7.2f} {theirs.size / cost.size:8.1f}",
            flush=True,
        )

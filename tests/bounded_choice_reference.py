"""What the bounded code chooses for a stream, again, in numpy: parameters, levels, bits.

Written from the description of each step in engine_native/codec_bounded.c. Every operation is one
of float32 in the order that is described there, so results are the same to the last bit.
"""

from __future__ import annotations

import numpy as np
from bounded_reference import NOTHING, ROUNDS, TOKENS, F, numbers, parameter_bytes, step_of

EXPONENT_MAX, CARRY_MAX, DELTA_MAX, LEVEL_MAX, CODES = 1000, 7, 63, 15, 14
CHANNEL_MIDDLE_MAX, TOKEN_MIDDLE_MAX, NUMBER_MAX = F(1023), F(2047), F(1e37)
SAMPLES, LANES, STEPS_MAX = 128, 8, 4095
HALFWAY = [F(2 ** ((2 * i + 1) / 16)) for i in range(8)]


def exponent_of(step: np.float32) -> int:
    """Of the step that is nearest in ratio."""
    if not step >= step_of(-EXPONENT_MAX):
        return -EXPONENT_MAX
    if not step <= step_of(EXPONENT_MAX):
        return EXPONENT_MAX
    mantissa, exponent = np.frexp(step)
    above = sum(F(2) * mantissa >= limit for limit in HALFWAY)
    return min((int(exponent) - 1) * 8 + int(above), EXPONENT_MAX)


class Measures:
    """Of each channel; what is no number is left out."""

    def __init__(self, x: np.ndarray) -> None:
        width, finite = x.shape[1], np.isfinite(x)
        count, total = np.zeros(width, F), np.zeros(width, F)
        for row, there in zip(x, finite, strict=True):
            count += there.astype(F)
            total += np.where(there, row, F(0))
        self.mean = np.where(count > 0, total / np.maximum(count, F(1)), F(0))
        self.least = np.where(finite, x, F(3.4e38)).min(0).clip(max=F(3.4e38))
        self.greatest = np.where(finite, x, F(-3.4e38)).max(0).clip(min=F(-3.4e38))
        self.nothing = (self.least == 0) & (self.greatest == 0) & (count == len(x))
        self.squares, self.products = np.zeros(width, F), np.zeros(width, F)
        before = np.zeros(width, F)
        for row, there in zip(x, finite, strict=True):
            deviation = np.where(there, row - self.mean, F(0))
            self.squares += deviation * deviation
            self.products += deviation * before
            before = deviation


def variance_and_range(row: np.ndarray) -> tuple[np.float32, np.float32]:
    """Of a token's values, in eight lanes; what is no number is 0."""
    width = len(row)
    padded = np.zeros(-(-width // LANES) * LANES, F)
    padded[:width] = np.where(np.isfinite(row), row, F(0))
    sums, squares = np.zeros(LANES, F), np.zeros(LANES, F)
    for part in padded.reshape(-1, LANES):
        sums += part
    mean = F(0)
    for lane in sums:
        mean += lane
    mean /= F(width)
    deviations = padded - mean
    deviations[width:] = 0
    for part in deviations.reshape(-1, LANES):
        squares += part * part
    total = F(0)
    for lane in squares:
        total += lane
    return total / F(width), padded[:width].max() - padded[:width].min()


class Choice:
    """The choice on its way; `fails` where there is none."""

    def __init__(self, words: np.ndarray, mode: int, factor: float, exact: int) -> None:
        self.x, self.factor = numbers(words[exact:], mode), F(factor)
        self.coded, self.width = len(self.x), words.shape[1]
        self.by_token, self.element = mode in TOKENS, words.itemsize
        self.of = Measures(self.x)
        self.carry, self.delta = np.zeros(self.width, int), np.zeros(self.width, int)
        self.steps = np.ones(self.width, F)
        self.unit = self.base = 0
        self.levels = np.zeros(self.coded, np.uint8)
        self.fails = not (np.abs(self.of.mean) <= NUMBER_MAX).all()
        self.fails = self.fails or not (self.tokens() if self.by_token else self.channels())

    def channels(self) -> bool:
        of, variance = self.of, self.of.squares / F(self.coded)
        used = np.flatnonzero(~of.nothing)
        if not (variance[used] <= NUMBER_MAX).all():
            return False
        total = F(0)
        for c in used:
            total += np.sqrt(variance[c])
        factor = self.factor
        if factor < 0:
            factor = factor * -(total / F(len(used)) if len(used) else F(0))
        exponents = np.zeros(self.width, int)
        for c in used:
            r = of.products[c] / of.squares[c] if of.squares[c] > 0 else F(0)
            r = max(r, F(0))
            self.carry[c] = int(min(r * F(8) + F(0.5), F(CARRY_MAX)))
            step = (of.greatest[c] - of.least[c]) / F(254)
            if factor > 0:
                step = self.channel_step(factor, variance[c], c, min(r, F(1)))
            exponents[c] = exponent_of(step)
        self.base = max([-EXPONENT_MAX + DELTA_MAX, *exponents[used].tolist()])
        self.delta[used] = np.minimum(self.base - exponents[used], DELTA_MAX)
        self.steps[used] = [step_of(self.base - int(delta)) for delta in self.delta[used]]
        return True

    def channel_step(
        self, wished: np.float32, variance: np.float32, c: int, r: np.float32
    ) -> np.float32:
        carry = F(self.carry[c]) / F(8)
        left = F(1) - F(2) * carry * r + carry * carry
        most = F(1.2) * np.sqrt(variance * left)
        least = max(abs(self.of.mean[c]) / (CHANNEL_MIDDLE_MAX / F(2)), wished * F(0.0625))
        return min(wished, max(most, least))

    def tokens(self) -> bool:
        exponents = []
        for row in self.x:
            variance, spread = variance_and_range(row)
            factor = abs(self.factor)
            wished = factor * np.sqrt(variance) if factor > 0 else spread / F(254)
            exponents.append(exponent_of(wished))
        used = sorted(e for e in exponents if e != -EXPONENT_MAX) or [0]
        middle = used[(len(used) - 1) // 2]
        base = max(used[0], middle - LEVEL_MAX)
        self.unit = int(used[-1] - base > LEVEL_MAX)
        self.base = min(base, EXPONENT_MAX - 2 * LEVEL_MAX)
        levels = (np.array(exponents) - self.base).clip(min=0) >> self.unit
        self.levels = levels.clip(max=LEVEL_MAX).astype(np.uint8)
        return True

    def prices(self) -> tuple[np.ndarray, int]:
        """(bits of each code and channel, of so many rows)."""
        every, state = -(-self.coded // SAMPLES), np.zeros(self.width, F)
        found, carry = np.zeros((CODES, self.width), np.int64), self.carry.astype(F) / F(8)
        for r, row in enumerate(self.x):
            kept = F(0) if self.by_token else carry * state
            size = self.steps
            if self.by_token:
                size = step_of(self.base + (int(self.levels[r]) << self.unit))
            from_ = row - self.of.mean
            d = from_ - kept
            ratio = np.abs(d) / size
            whole = np.where(ratio < STEPS_MAX, ratio, F(STEPS_MAX)).astype(int)
            back = kept + np.copysign((whole.astype(F) + F(0.5)) * size, d)
            exact = np.where(np.isfinite(from_), from_, F(0))
            state = np.where(whole < STEPS_MAX, back, exact)
            if r % every == 0:
                found += [self.price(whole, code) for code in range(CODES)]
        return found, -(-self.coded // every)

    def price(self, whole: np.ndarray, code: int) -> np.ndarray:
        low, digit = code >> 1, 1 + (code & 1)
        further = ((whole >> low) - (2**digit - 2)).clip(min=0)
        return 1 + low + digit + np.where(further > ROUNDS, ROUNDS + 8 * self.element, further)

    def field(self, prices: np.ndarray, c: int) -> tuple[int, int] | None:
        """(a channel's code, its middle), None where no code reaches the middle."""
        step = step_of(self.base) if self.by_token else self.steps[c]
        limit = TOKEN_MIDDLE_MAX if self.by_token else CHANNEL_MIDDLE_MAX
        for code in range(int(prices[:, c].argmin()), CODES, 2):
            middle = self.of.mean[c] / (step * F(2 ** max((code >> 1) - 1, 0)))
            if abs(middle) <= limit:
                return code, int(middle + np.copysign(F(0.5), middle))
        return None


def reference_choose(
    words: np.ndarray, mode: int, factor: float, exact: int
) -> tuple[int, list[int], list[int]]:
    """What bounded_reference.choose() gives; bits 0, and nothing else, where it can't be coded."""
    if len(words) <= exact:
        return 0, [], []
    with np.errstate(all="ignore"):
        choice = Choice(words, mode, factor, exact)
        if choice.fails:
            return 0, [], []
        prices, sampled = choice.prices()
        out = [choice.base & 255, choice.base >> 8 & 255, exact, choice.unit]
        bits = 0
        for c in range(choice.width):
            field, size = NOTHING, 2 if choice.by_token else 3
            if not choice.of.nothing[c]:
                found = choice.field(prices, c)
                if found is None:
                    return 0, [], []
                code, middle = found
                bits += int(prices[code, c])
                carry, delta = int(choice.carry[c]), int(choice.delta[c])
                field = code | (middle << 4 if choice.by_token else carry << 4 | delta << 7)
                field |= 0 if choice.by_token else middle << 13
            out += list((field & (1 << 8 * size) - 1).to_bytes(size, "little"))
    bits = bits * choice.coded // sampled + (4 * choice.coded if choice.by_token else 0)
    bits += 8 * exact * words.itemsize * choice.width + 8 * parameter_bytes(choice.width, mode)
    return bits, out, [0] * exact + choice.levels.tolist()

"""RMSNorm's backward pass over rows in pieces of a power of two, as `norm.tinyllm_norm_backward` but for the layout.

There a row of 320 is one of 512, of which every third lane has nothing to do, and it lies in two warps, which meet at
barriers to sum over it. Here it is five pieces of 64, which lie in the same few lanes: 60 KB at a time are asked for
on a multiprocessor, and no step has a barrier.
"""

# mypy: ignore-errors
# (Tuples grow in loops that Triton unrolls.)

import triton
import triton.language as tl

_MOST_PIECES = 8
_MOST_ELEMENTS = 4096
"""That a program of four warps holds at a time: 32 a thread of three tensors, the sums and the scale."""


def pieces_of(width: int) -> tuple[int, int] | None:
    """Columns of a piece, and rows of a program at a time; None where rows are better held whole.

    As those of a power of two are: 45 us of 52 in pieces at a width of 512 (36 of 29 at 320, 63 of 59 at 640).
    """
    power_of_two = width & -width
    piece = min(power_of_two, 256)
    if power_of_two == width or piece < 64 or width // piece > _MOST_PIECES:
        return None
    rows = 16
    while rows > 1 and rows * width > _MOST_ELEMENTS:
        rows //= 2
    return piece, rows


@triton.jit
def _add(one, other):
    return one + other  # tl.sum would do; the interpreter runs this module's functions alone


@triton.jit
def tinyllm_norm_backward_pieces(
    dnormed, dtotal, total, scale, inverse, dx, ddelta, partial, rows, stripes,
    STEPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
    CARRIES: tl.constexpr, CASTS: tl.constexpr,
):  # fmt: skip
    """With u = x/rms, g = scale * dnormed: dx = (g - u mean(g u))/rms + dtotal, dscale = sum over rows of dnormed * u.

    Sums are float32. Loads of a step come before what depends on any of them.
    """
    pieces: tl.constexpr = WIDTH // PIECE
    model = tl.program_id(0) // stripes
    first = tl.program_id(0) % stripes * (STEPS * ROWS)
    column = tl.arange(0, PIECE)
    zero = tl.full((ROWS, PIECE), 0.0, tl.float32)
    sums, factors = (), ()
    for piece in tl.static_range(pieces):
        sums += (zero,)
        factors += (tl.load(scale + model * WIDTH + piece * PIECE + column).to(tl.float32)[None, :],)
    for step in range(STEPS):
        row = first + step * ROWS + tl.arange(0, ROWS)
        real, inside = row < rows, (row < rows)[:, None]
        row = model.to(tl.int64) * rows + row
        at = row[:, None] * WIDTH + column[None, :]
        upstreams, values, carried = (), (), ()
        for piece in tl.static_range(pieces):
            upstreams += (tl.load(dnormed + at + piece * PIECE, mask=inside, other=0.0),)
            values += (tl.load(total + at + piece * PIECE, mask=inside, other=0.0),)
            if CARRIES:
                carried += (tl.load(dtotal + at + piece * PIECE, mask=inside, other=0.0),)
        per_rms = tl.load(inverse + row, mask=real, other=0.0)
        products, fresh = zero, ()
        for piece in tl.static_range(pieces):
            product = upstreams[piece].to(tl.float32) * (values[piece].to(tl.float32) * per_rms[:, None])
            fresh += (sums[piece] + product,)
            products += product * factors[piece]
        sums = fresh
        mean = (tl.reduce(products, 1, _add) / WIDTH)[:, None]
        for piece in tl.static_range(pieces):
            unit = values[piece].to(tl.float32) * per_rms[:, None]
            gradient = (upstreams[piece].to(tl.float32) * factors[piece] - unit * mean) * per_rms[:, None]
            if CARRIES:
                gradient += carried[piece].to(tl.float32)
            tl.store(dx + at + piece * PIECE, gradient, mask=inside)
            if CASTS:
                tl.store(ddelta + at + piece * PIECE, gradient, mask=inside)
    for piece in tl.static_range(pieces):
        place = tl.program_id(0).to(tl.int64) * WIDTH + piece * PIECE + column
        tl.store(partial + place, tl.reduce(sums[piece], 0, _add))

"""The preconditioning kernel beyond what tests/test_kernels.py asks of every kernel: which ranks it takes."""

import pytest

from bench.micro.case import Sizes
from prokl.kernels.precondition import TILES, TILES_FP64, can_use_precondition, choose_tile
from tests.kernel_cases import DOUBLE, PRECONDITION, SINGLE


@pytest.mark.parametrize("tiles, dtype", [(TILES, SINGLE), (TILES_FP64, DOUBLE)], ids=["float32", "float64"])
def test_every_tile_is_chosen_for_the_ranks_that_it_holds_and_more_are_refused(tiles, dtype):
    most = tiles[0].n
    assert {choose_tile(r, dtype) for r in range(1, most + 1)} == set(tiles)
    assert all(choose_tile(r, dtype).n >= r for r in range(1, most + 1)) and choose_tile(most + 1, dtype) is None
    for r in (most, most + 1):
        a = PRECONDITION.make(Sizes(1, 2, 1, r), (dtype,) * 4)
        assert can_use_precondition(*[*a.values()][:4]) == (r == most)
    with pytest.raises(ValueError, match=rf"G_par has r={most + 1}; must be at most {most} in torch.f"):
        PRECONDITION.run(**a)

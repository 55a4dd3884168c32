from rayrec.models.base.shape_classes import power_of_two


def test_powers_of_two_are_those_that_are_not_less():
    sizes = [power_of_two(size) for size in (0, 1, 2, 3, 4, 5, 64, 65)]

    assert sizes == [1, 1, 2, 4, 4, 8, 64, 128]

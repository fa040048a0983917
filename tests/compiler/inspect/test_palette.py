"""The palette's hues can be told apart by everybody, and seen on their ground."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from monarch.compiler.inspect.html import contrast
from monarch.compiler.inspect.palette import DIMS, ROLES, of_mesh, variables

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009:
# severity 1.0, on linear RGB.
SIGHTS = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def linear(color: str) -> np.ndarray:
    channels = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Ottosson, "A perceptual color space for image processing", 2020."""
    to_lms = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_lms) @ rgb)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHTS)
def test_the_hues_are_told_apart(theme: str, sight: str) -> None:
    colors = [getattr(shade, theme) for shade in (*DIMS, ROLES["whole"])]
    seen = {color: oklab(np.clip(SIGHTS[sight] @ linear(color), 0, 1)) for color in colors}
    nearest = min(combinations(colors, 2), key=lambda pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]))
    assert np.linalg.norm(seen[nearest[0]] - seen[nearest[1]]) > 0.1, nearest


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_hues_stand_out_from_their_ground(theme: str) -> None:
    for ground in ("ground", "surface"):
        behind = getattr(ROLES[ground], theme)
        for shade in DIMS:
            assert contrast(getattr(shade, theme), behind) >= (3 if ground == "ground" else 2.8), shade
        for role in ("text", "muted", "accent", "error"):
            assert contrast(getattr(ROLES[role], theme), behind) >= 4.5, role


def test_contrast_is_wcags() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_a_meshs_dims_take_the_hues_in_order() -> None:
    names = [f"d{place}" for place in range(7)]
    assert list(of_mesh(names).values()) == [*DIMS, DIMS[0]]
    assert variables("dark", "--x-").startswith(f"--x-dim0: {DIMS[0].dark};")
    assert f"--ground: {ROLES['ground'].light};" in variables("light")

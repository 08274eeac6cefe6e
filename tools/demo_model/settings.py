"""What may happen where: four plots for each place, so that the place says something."""

from typing import Final

from tools.demo_model.frame import Plot
from tools.demo_model.plots_joy import FIND, GIFT, LEARN, NIGHT, SEED, SHARE
from tools.demo_model.plots_trouble import BROKEN, LOST, NOISE, QUARREL, RAIN, STUCK

PLOTS_AT: Final[dict[str, tuple[Plot, ...]]] = {
    "forest": (NOISE, STUCK, NIGHT, FIND),
    "park": (LOST, RAIN, QUARREL, GIFT),
    "garden": (SEED, SHARE, GIFT, NOISE),
    "meadow": (SEED, RAIN, LEARN, LOST),
    "orchard": (SHARE, SEED, STUCK, FIND),
    "valley": (NIGHT, NOISE, RAIN, BROKEN),
    "village": (GIFT, QUARREL, LEARN, SHARE),
    "river": (BROKEN, STUCK, LEARN, SHARE),
    "lake": (BROKEN, LEARN, LOST, NIGHT),
    "pond": (LEARN, STUCK, NOISE, QUARREL),
    "hill": (NIGHT, RAIN, BROKEN, LOST),
    "farm": (SEED, GIFT, SHARE, NOISE),
    "beach": (BROKEN, FIND, QUARREL, LOST),
    "bridge": (STUCK, LOST, RAIN, NIGHT),
    "market": (GIFT, SHARE, LOST, QUARREL),
    "mill": (NOISE, FIND, SEED, RAIN),
    "castle": (FIND, LEARN, QUARREL, GIFT),
}

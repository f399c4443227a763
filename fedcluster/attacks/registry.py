"""The table of attacks."""

from typing import Any

from fedcluster.attacks.samples import Backdoor, LabelFlip, Replacement
from fedcluster.attacks.updates import Gaussian, InnerProduct, LittleIsEnough, SignFlip

ATTACKS: dict[str, Any] = {
    "sign_flip": SignFlip,
    "gaussian": Gaussian,
    "label_flip": LabelFlip,
    "backdoor": Backdoor,
    "replacement": Replacement,
    "little_is_enough": LittleIsEnough,
    "inner_product": InnerProduct,
}

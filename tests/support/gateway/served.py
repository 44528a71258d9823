"""What requests are validated against."""

from gateway.config.served_model import ServedModel
from gateway.model.model_folder import Defaults

SERVED = ServedModel("fake", 1024, 400, frozenset([0, 4]), Defaults(), proposers=frozenset(["ngram"]))

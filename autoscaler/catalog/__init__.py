"""Models and cards as data: those that are shipped, and a model's own `config.json`."""

from autoscaler.catalog.cards import card, card_names
from autoscaler.catalog.models import model, model_names

__all__ = ["card", "card_names", "model", "model_names"]

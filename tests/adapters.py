"""The functions that the acceptance cases are run through; each family is mapped in a file of its own."""

from tests.adapters_golden import golden
from tests.adapters_models import hf_logits
from tests.adapters_parsers import parse_tool_calls
from tests.adapters_rewards import combine, group, metrics, reward_function
from tests.adapters_scenarios import token_scenario

__all__ = [
    "combine",
    "golden",
    "group",
    "hf_logits",
    "metrics",
    "parse_tool_calls",
    "reward_function",
    "token_scenario",
]

"""The look at the chat template before training, at every real template there is."""

from __future__ import annotations

import pytest

from hermes_jax.rollout.chat import ChatRenderer
from hermes_jax.rollout.parsers import get_parser
from hermes_jax.rollout.template import TemplateError
from hermes_jax.rollout.template_check import check_prompt, examine
from hermes_jax.rollout.tool_prompt import tool_system_prompt
from tests.rollout.test_chat import CHATML, TOOL
from tests.rollout.tokenizers import codec, smollm2, templates

# What these templates do was looked up in their text; anything that can't be used is refused with the reason.
REFUSED = dict.fromkeys(
    ("idefics3", "idefics3_training", "llava_next", "llava_next_training", "smolvlm", "smolvlm_training"),
    "leaves out the user's text",
)
HIDES_TOOLS = ("cohere", "deepseek", "gemma3", "gemma_", "llama3_training", "phi3", "qwen2_5_vl")
REWRITES = ("deepseek_r1_distill", "deepseekv3", "deepseekv3_training", "diffusion_gemma", "gptoss", "muse_glimmer")
RESULTS_AS_USER = ("cohere", "gemma3", "gemma_training", "phi3")


def renderer(template, **options):
    return ChatRenderer(codec("byte_level"), template, **options)


@pytest.mark.parametrize("name", templates())
def test_every_real_template_is_classified_or_refused(name):
    if name in REFUSED:
        with pytest.raises(TemplateError, match=REFUSED[name]):
            examine(renderer(templates()[name]))
        return
    report = examine(renderer(templates()[name]))
    hides = name in ("gemma", "llama3") or name.startswith(HIDES_TOOLS)
    assert report.shows_tools == (not hides)
    assert report.results_as_user == (name == "gemma" or name.startswith(RESULTS_AS_USER))
    rewrites = name in REWRITES or name.startswith(("diffusion_gemma", "gptoss", "muse_glimmer"))
    if not name.startswith("gemma4"):
        assert report.keeps_prefix == (not rewrites)
    assert report.opens_thinking == report.generation_prompt.endswith("<think>\n")
    assert report.end_of_turn in codec("byte_level").added
    assert codec("byte_level").added[report.end_of_turn].id in report.stop_ids
    assert report.bos <= 1
    assert len(report.lines()) >= 1


@pytest.mark.parametrize(
    ("name", "end", "generation_prompt"),
    [
        ("qwen3", "<|im_end|>", "<|im_start|>assistant\n"),
        ("qwen3_5_think", "<|im_end|>", "<|im_start|>assistant\n<think>\n"),
        ("llama3_1", "<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("gemma3", "<end_of_turn>", "<start_of_turn>model\n"),
        ("glm4moe", "<|observation|>", "<|assistant|>"),
    ],
)
def test_how_replies_begin_and_end(name, end, generation_prompt):
    report = examine(renderer(templates()[name]))
    assert (report.end_of_turn, report.generation_prompt) == (end, generation_prompt)


def test_stop_ids_hold_every_way_to_end_a_reply():
    names = {renderer(templates()["glm4moe"]).text_of(i) for i in examine(renderer(templates()["glm4moe"])).stop_ids}
    assert names == {"<|observation|>", "<|user|>", "<|endoftext|>"}


def test_thinking_taken_out_of_history_is_reported():
    strip = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    )
    report = examine(renderer(strip + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"))
    assert (report.keeps_prefix, report.keeps_thinking) == (True, False)
    assert "thinking is taken out of history" in report.lines()[0]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages if m.role != 'user' %}{{ m.content }}<|im_end|>{% endfor %}",
            "leaves out the user's text",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}",
            "leaves out tool calls or their results",
        ),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "a reply has no end"),
    ],
)
def test_unusable_templates_are_refused_with_the_reason(template, reason):
    with pytest.raises(TemplateError, match=reason):
        examine(renderer(template))


def test_tools_that_nobody_shows_are_an_error_with_the_remedy():
    user = {"role": "user", "content": "go"}
    with pytest.raises(TemplateError, match=r"can't see the tools ping.*tool_system_prompt\(\)"):
        check_prompt(renderer(CHATML, tools=[TOOL]), [user])
    system = {"role": "system", "content": tool_system_prompt([TOOL], get_parser("hermes").syntax, "Be brief.")}
    assert check_prompt(renderer(CHATML, tools=[TOOL]), [system, user])
    assert check_prompt(renderer(templates()["qwen3"], tools=[TOOL]), [user])


def test_a_prompt_that_does_not_fit_is_an_error():
    user = {"role": "user", "content": "go " * 50}
    with pytest.raises(TemplateError, match=r"a prompt has \d+ tokens, the context holds 40"):
        check_prompt(renderer(CHATML), [user], context_limit=40)


def test_smollm2s_own_template():
    own = ChatRenderer(codec("smollm2"), smollm2().chat_template)
    report = examine(own)
    assert (report.end_of_turn, report.shows_tools, report.keeps_prefix, report.bos) == ("<|im_end|>", False, True, 1)
    assert [own.text_of(i) for i in report.stop_ids] == ["<|im_end|>"]

"""The first screen: questions that users have, and the commands that answer them."""

from lpconv.version import __version__

# README.md has the same table; a test compares the two.
QUESTIONS = {
    "What would low precision save and cost?": "lpconv advise MODEL",
    "Make it smaller": "lpconv convert MODEL --format e4m3fn",
    "Serve it with vLLM": "lpconv convert MODEL --scheme FP8_DYNAMIC",
    "Keep more of it in 4 bits": "lpconv convert MODEL --scheme W4A16 --rounding gptaq --calibrate FILE",
    "Train without fp32 copies of the weights": "lpconv finetune MODEL --recipe collage-bf16",
    "What would fp8 lose, and where?": "lpconv probe MODEL",
    "Is it faster on this machine?": "lpconv bench MODEL",
    "Is this quantised checkpoint valid?": "lpconv inspect PATH",
    "Does this output still match its source?": "lpconv verify PATH --against MODEL",
    "How do its outputs differ on my text?": "lpconv verify PATH --against MODEL --data FILE",
    "Does it still answer questions as well?": "lpconv verify PATH --against MODEL --tasks NAME",
    "What does my machine support?": "lpconv doctor",
}


def first_screen() -> str:
    """Text that `lpconv` prints if no command is given."""
    return "\n".join(
        [
            f"lpconv {__version__}: make Hugging Face models smaller or train them in low precision, and see the cost.",
            "",
            *_lines(QUESTIONS),
            "",
            "MODEL is a directory, a URL, a name on the Hugging Face hub, or demo, a small model that is included.",
            "Try it: lpconv demo. All commands: lpconv --help.",
        ]
    )


def next_steps() -> str:
    """Commands to try after the demo, for the user's own model."""
    wanted = list(QUESTIONS)[:5]
    return "\n".join(["With a model of your own:", "", *_lines({q: QUESTIONS[q] for q in wanted})])


def _lines(questions: dict[str, str]) -> list[str]:
    width = max(map(len, questions))
    return [f"  {question:<{width}}  {command}" for question, command in questions.items()]

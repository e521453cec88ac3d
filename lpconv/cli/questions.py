"""The first screen: questions that users have, and the commands that answer them."""

from lpconv.version import __version__

# README.md has the same table; a test compares the two.
QUESTIONS = {
    "What would low precision buy my model?": "lpconv advise MODEL",
    "Make it smaller": "lpconv convert MODEL --format e4m3fn",
    "Serve it with vLLM": "lpconv convert MODEL --scheme FP8_DYNAMIC",
    "Train without fp32 copies of the weights": "lpconv finetune MODEL --recipe collage-bf16",
    "What would fp8 lose, and where?": "lpconv probe MODEL",
    "Is it faster on this machine?": "lpconv bench MODEL",
    "Is this quantised file sane?": "lpconv inspect PATH",
    "Is this output what its source says?": "lpconv verify PATH --against MODEL",
    "What does it say differently on my text?": "lpconv verify PATH --against MODEL --data FILE",
    "Can this machine do it?": "lpconv doctor",
}


def first_screen() -> str:
    """Text that `lpconv` prints if no command is given."""
    return "\n".join(
        [
            f"lpconv {__version__}: Hugging Face checkpoints in low-precision forms that still are the model.",
            "",
            *_lines(QUESTIONS),
            "",
            "MODEL is a directory, a URL, a name on the Hugging Face hub, or demo, a small model that is included.",
            "See it work: lpconv demo. All commands: lpconv --help.",
        ]
    )


def next_steps() -> str:
    """Commands to try after the demo, for the user's own model."""
    wanted = list(QUESTIONS)[:5]
    return "\n".join(["With a model of your own:", "", *_lines({q: QUESTIONS[q] for q in wanted})])


def _lines(questions: dict[str, str]) -> list[str]:
    width = max(map(len, questions))
    return [f"  {question:<{width}}  {command}" for question, command in questions.items()]

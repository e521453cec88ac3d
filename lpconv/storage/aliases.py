"""Short names of common models and their hub ids.

Every repository below also has its bare name as an alias, under which many were published before they moved to an
owner: ``gpt2`` is ``openai-community/gpt2``. Names are compared without regard to case.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A short name, its hub id, and the family under which it is listed."""

    name: str
    repo_id: str
    family: str


# (family, owner, repositories); SHORT=NAME adds the alias SHORT.
_REPOSITORIES = (
    ("BERT", "google-bert", "bert-base=bert-base-uncased bert-base-cased bert-large=bert-large-uncased "
     "bert-large-cased bert-large-uncased-whole-word-masking bert-base-multilingual-cased "
     "bert-base-multilingual-uncased bert-base-chinese bert-base-german-cased"),
    ("BERT", "prajjwal1", "bert-tiny bert-mini bert-small bert-medium"),
    ("ModernBERT", "answerdotai", "ModernBERT-base ModernBERT-large"),
    ("RoBERTa", "FacebookAI", "roberta-base roberta-large roberta-large-mnli xlm-roberta-base xlm-roberta-large"),
    ("DistilBERT", "distilbert", "distilbert-base=distilbert-base-uncased distilbert-base-cased "
     "distilbert-base-multilingual-cased distilbert-base-uncased-finetuned-sst-2-english "
     "distilroberta=distilroberta-base distilgpt2"),
    ("ALBERT", "albert", "albert-base-v1 albert-large-v1 albert-xlarge-v1 albert-xxlarge-v1 "
     "albert-base=albert-base-v2 albert-large=albert-large-v2 albert-xlarge=albert-xlarge-v2 "
     "albert-xxlarge=albert-xxlarge-v2"),
    ("ELECTRA", "google", "electra-small=electra-small-discriminator electra-base=electra-base-discriminator "
     "electra-large=electra-large-discriminator electra-small-generator electra-base-generator "
     "electra-large-generator"),
    ("DeBERTa", "microsoft", "deberta-base deberta-large deberta-v3-xsmall deberta-v3-small deberta-v3-base "
     "deberta-v3-large"),
    ("Sentence encoders", "sentence-transformers", "all-MiniLM-L6-v2 all-MiniLM-L12-v2 all-mpnet-base-v2"),
    ("GPT-2", "openai-community", "gpt2 gpt2-medium gpt2-large gpt2-xl"),
    ("GPT-Neo", "EleutherAI", "gpt-neo-125m gpt-neo-1.3B gpt-neo-2.7B gpt-j-6b gpt-neox-20b"),
    ("OPT", "facebook", "opt-125m opt-350m opt-1.3b opt-2.7b opt-6.7b opt-13b opt-30b opt-66b"),
    ("Pythia", "EleutherAI", "pythia-14m pythia-31m pythia-70m pythia-160m pythia-410m pythia-1b pythia-1.4b "
     "pythia-2.8b pythia-6.9b pythia-12b pythia-70m-deduped pythia-160m-deduped pythia-410m-deduped "
     "pythia-1b-deduped pythia-1.4b-deduped pythia-2.8b-deduped pythia-6.9b-deduped pythia-12b-deduped"),
    ("Llama", "meta-llama", "llama-2-7b=Llama-2-7b-hf llama-2-13b=Llama-2-13b-hf llama-2-70b=Llama-2-70b-hf "
     "llama-2-7b-chat=Llama-2-7b-chat-hf llama-2-13b-chat=Llama-2-13b-chat-hf llama-2-70b-chat=Llama-2-70b-chat-hf "
     "llama-3-8b=Meta-Llama-3-8B llama-3-8b-instruct=Meta-Llama-3-8B-Instruct llama-3-70b=Meta-Llama-3-70B "
     "llama-3-70b-instruct=Meta-Llama-3-70B-Instruct Llama-3.1-8B Llama-3.1-8B-Instruct Llama-3.1-70B "
     "Llama-3.1-70B-Instruct Llama-3.2-1B Llama-3.2-1B-Instruct Llama-3.2-3B Llama-3.2-3B-Instruct "
     "Llama-3.3-70B-Instruct"),
    ("Llama", "TinyLlama", "tinyllama=TinyLlama-1.1B-Chat-v1.0"),
    ("Llama", "HuggingFaceTB", "SmolLM2-135M SmolLM2-360M SmolLM2-1.7B SmolLM2-135M-Instruct SmolLM2-360M-Instruct "
     "SmolLM2-1.7B-Instruct"),
    ("Mistral", "mistralai", "mistral-7b=Mistral-7B-v0.1 Mistral-7B-v0.3 Mistral-7B-Instruct-v0.1 "
     "Mistral-7B-Instruct-v0.2 Mistral-7B-Instruct-v0.3 mixtral-8x7b=Mixtral-8x7B-v0.1 Mixtral-8x7B-Instruct-v0.1 "
     "mixtral-8x22b=Mixtral-8x22B-v0.1"),
    ("Qwen", "Qwen", "Qwen2-0.5B Qwen2-1.5B Qwen2-7B Qwen2-72B Qwen2.5-0.5B Qwen2.5-1.5B Qwen2.5-3B Qwen2.5-7B "
     "Qwen2.5-14B Qwen2.5-32B Qwen2.5-72B Qwen2.5-0.5B-Instruct Qwen2.5-1.5B-Instruct Qwen2.5-3B-Instruct "
     "Qwen2.5-7B-Instruct Qwen2.5-14B-Instruct Qwen2.5-32B-Instruct Qwen2.5-72B-Instruct Qwen3-0.6B Qwen3-1.7B "
     "Qwen3-4B Qwen3-8B Qwen3-14B Qwen3-32B"),
    ("T5", "google-t5", "t5-small t5-base t5-large t5-3b t5-11b"),
    ("T5", "google", "flan-t5-small flan-t5-base flan-t5-large flan-t5-xl flan-t5-xxl"),
    ("BART", "facebook", "bart-base bart-large bart-large-cnn bart-large-mnli"),
    ("ViT", "google", "vit-base=vit-base-patch16-224 vit-base-patch16-224-in21k vit-large=vit-large-patch16-224"),
    ("Whisper", "openai", "whisper-tiny whisper-tiny.en whisper-base whisper-base.en whisper-small whisper-small.en "
     "whisper-medium whisper-medium.en whisper-large whisper-large-v2 whisper-large-v3 whisper-large-v3-turbo"),
)  # fmt: skip


def _aliases() -> Iterator[Alias]:
    for family, owner, repositories in _REPOSITORIES:
        for entry in repositories.split():
            *short, repository = entry.split("=")
            for name in (*short, repository.casefold()):
                yield Alias(name=name, repo_id=f"{owner}/{repository}", family=family)


ALIASES: dict[str, Alias] = {a.name: a for a in _aliases()}

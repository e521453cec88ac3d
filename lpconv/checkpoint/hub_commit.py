"""Files to a repository on the Hugging Face hub, as one commit: all of them are there, or none.

`huggingface_hub` finds the token, asks which files are large, uploads these first, and commits them all. lpconv never
sees the token.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lpconv.checkpoint.hub import bars_on_terminals_only, why_unreachable
from lpconv.errors import InputError, LpconvError, OutputExistsError, UsageError

__all__ = ["check_repository", "commit_files"]

# What tools load by their names; such a file of another checkpoint must not lie beside ours.
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf")


def check_repository(repo_id: str) -> None:
    """Raise UsageError for what is no name of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as e:
        raise UsageError(f"`{repo_id}` is no hub id: {e}", hint="write it as OWNER/NAME") from e
    if "/" not in repo_id:
        raise UsageError(f"`{repo_id}` has no owner", hint="write it as OWNER/NAME")


def commit_files(repo_id: str, files: Mapping[str, Path], *, message: str, private: bool) -> tuple[str, str]:
    """One commit of `files`, by their names there, to a repository, which is made where it is missing. Gives its hash
    and its address.

    Raises InputError where the hub cannot be reached or refuses, OutputExistsError where the repository has weights of
    another checkpoint.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise InputError("HF_HUB_OFFLINE is set: nothing can be sent", hint="unset it, or look with --dry-run")
    if (why := why_unreachable(constants.ENDPOINT)) is not None:
        raise InputError(f"nothing can be sent: {why}", hint="try again with a network, or look with --dry-run")
    api = HfApi()
    with _explained(repo_id), bars_on_terminals_only():
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        others = sorted(n for n in api.list_repo_files(repo_id) if n.endswith(_WEIGHTS) and n not in files)
        if others:
            raise OutputExistsError(
                f"`{repo_id}` has weights of another checkpoint, first `{others[0]}`",
                hint="delete them there, or name another repository",
            )
        adds = [CommitOperationAdd(path_in_repo=n, path_or_fileobj=p) for n, p in files.items()]
        made = api.create_commit(repo_id, adds, commit_message=message)
    return str(made.oid), str(made.commit_url)


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Errors of the hub's client, and of the libraries below it, which vary by version, as one of ours."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        yield
    except LpconvError:
        raise
    except LocalTokenNotFoundError as e:
        raise InputError("the hub knows no account here", hint="run `hf auth login` or set HF_TOKEN") from e
    except Exception as e:
        what = str(e).strip().partition("\n")[0]
        status = getattr(getattr(e, "response", None), "status_code", None) if isinstance(e, HfHubHTTPError) else None
        denied = status in (401, 403)
        hint = "run `hf auth login` with a token that may write there, or set HF_TOKEN" if denied else "try again later"
        raise InputError(f"the hub refused `{repo_id}`, and nothing was committed: {what}", hint=hint) from e

"""Features with optional dependencies: object stores (obstore), GGUF files (gguf), tasks (lm-eval) and Ray clusters.

The rest of lpconv imports these names only from here, never from the modules in this package, so that the optional
packages need not be installed. Each name loads its module on first use.
"""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.extras.gguf import make_view as make_view
    from lpconv.extras.gguf_model import GgufModel as GgufModel, gguf_model as gguf_model
    from lpconv.extras.lm_eval import answer_tasks as answer_tasks, read_tasks as read_tasks
    from lpconv.extras.ray import RayExecutor as RayExecutor
    from lpconv.extras.remote import (
        WINDOW_BYTES as WINDOW_BYTES,
        RemoteFile as RemoteFile,
        head as head,
        upload_bytes as upload_bytes,
    )
    from lpconv.extras.remote_output import (
        RemoteStaging as RemoteStaging,
        check_free_url as check_free_url,
        delete_records as delete_records,
        working_folder as working_folder,
    )
    from lpconv.extras.remote_view import copy_of as copy_of, view_of as view_of

__all__ = lazily(__name__)

"""Write some or all weight files of a plan into a working folder whose journal lists the complete ones."""

from collections.abc import Sequence

from lpconv.convert.apply import Engine
from lpconv.plan.job import Job
from lpconv.plan.plan import PlannedShard
from lpconv.plan.workers import SingleThreadedTorch
from lpconv.progress import Progress
from lpconv.results import WrittenShard, from_json, to_json
from lpconv.storage.place import any_pointer
from lpconv.storage.staging import Staging


def write_shards(
    job: Job, shards: Sequence[PlannedShard], staging: Staging, progress: Progress
) -> tuple[WrittenShard, ...]:
    """Write those of `shards` that are not in the journal yet. Returns the records of all `shards`, in order."""
    written = {line["shard"]: from_json(WrittenShard, line) for line in staging.done if "tensors" in line}
    progress.start("converting", sum(s.bytes_read for s in shards))
    with SingleThreadedTorch():
        # Reading many small pieces of a remote file takes longer than reading all of it.
        is_here = not any_pointer(job.checkpoint.directory, job.checkpoint.weight_files)
        engine = Engine(job.source, workers=job.memory.workers, progress=progress, guesses=is_here)
        try:
            for shard in shards:
                name = shard.root.name
                if name in written:
                    progress.advance(shard.bytes_read)
                    continue
                files, tensors = engine.write_shard(shard, staging.create)
                written[name] = WrittenShard(shard=name, files=tuple(files), tensors=tuple(tensors))
                staging.append(to_json(written[name]))
        finally:
            engine.close()
    return tuple(written[s.root.name] for s in shards)

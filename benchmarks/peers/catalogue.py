"""The peers: their packages, what their documentation advises, how that was followed, and what they lack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...loader.errors import ConfigError
from ...storage.suggestions import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One other loader.

    ``advice`` is a sentence of its documentation at ``source``, ``setup`` how it was followed here. ``lacks`` maps
    "s3" to the reason why it cannot be measured there. Without ``has_workers`` it runs in threads of one process.
    """

    name: str
    package: str
    imports: str
    advice: str
    source: str
    setup: str
    order: str
    """How far it shuffles."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    has_workers: bool = True
    shared: bool = False
    """Comes with penstock's own dependencies, and needs no environment of its own."""


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="webdataset",
            package="webdataset",
            imports="webdataset",
            advice="Note that we do the batching inside each worker; this is important for efficiency, since "
            "transferring "
            "individual samples is slow.",
            source="https://github.com/tmbdev/wds-distributed",
            order="shards at random, samples in a buffer of 1,000",
            setup="tar shards, shuffled in a buffer of 1,000 samples, batched in the workers; S3 by curl in a pipe",
        ),
        Peer(
            name="mosaicml-streaming",
            package="mosaicml-streaming",
            imports="streaming",
            advice="Either increase the predownload parameter to StreamingDataset, or increase the number of "
            "workers for "
            "your dataloader, to allow more samples to be prepared ahead of time.",
            source=""
            "https://docs.mosaicml.com/projects/streaming/en/latest/distributed_training/performance_tuning.html",
            order="shards at random, samples in ranges that span several of them (py1e)",
            setup="uncompressed MDS shards, shuffle_algo py1e, its own StreamingDataLoader",
        ),
        Peer(
            name="litdata",
            package="litdata",
            imports="litdata",
            advice="Use StreamingDataset for fastest streaming after optimizing your data.",
            source="https://github.com/Lightning-AI/litData#readme",
            order="chunks at random, samples at random inside each, or inside blocks of it",
            setup="optimized chunks, TokensLoader for tokens, max_pre_download=4, its own StreamingDataLoader",
        ),
        Peer(
            name="datasets",
            package="datasets",
            imports="datasets",
            advice="You can parallelize data loading with the num_workers argument of a PyTorch DataLoader and get a "
            "higher throughput.",
            source="https://huggingface.co/docs/datasets/use_with_pytorch",
            order="at random over all samples; from S3 shards at random, samples in a buffer of 1,000",
            setup="Arrow files, memory-mapped with with_format('torch') where local, streamed by s3fs from S3 with a "
            "shuffle buffer of 1,000",
        ),
        Peer(
            name="grain",
            package="grain",
            imports="grain",
            advice="S3 Mountpoint enables you to mount your S3 bucket as a local file system, allowing you "
            "to access and "
            "read data as if it were stored locally.",
            source="https://google-grain.readthedocs.io/en/latest/tutorials/data_sources/load_from_s3_tutorial.html",
            order="at random over all samples",
            setup="ArrayRecord files, shuffled globally and batched as MapDataset, 16 reading threads (its "
            "default) in each of "
            "mp_prefetch's processes",
            lacks={"s3": "it reads S3 through a bucket mounted as a folder, which needs a FUSE mount on the machine"},
        ),
        Peer(
            name="spdl",
            package="spdl",
            imports="spdl.pipeline",
            advice="The spdl.io.iter_tarfile() function processes data fastest when the input is a byte string.",
            source="https://facebookresearch.github.io/spdl/0.1.7/generated/benchmark_tarfile.html",
            order="shards at random, samples at random inside each",
            setup="a Pipeline of threads: whole shards read, taken apart by iter_tarfile (numbers: by "
            "load_npy), batched "
            "inside a shard, decoded a batch a thread; S3 by obstore. It shuffles shards, and samples inside each",
            has_workers=False,
        ),
        Peer(
            name="torch",
            package="torch",
            imports="torch",
            advice="Setting num_workers > 0 enables asynchronous data loading and overlap between the "
            "training and data "
            "loading.",
            source="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
            order="at random over all samples",
            setup="torch.utils.data.DataLoader over a memory-mapped file of records with __getitems__, "
            "shuffled globally",
            lacks={"s3": "torch's DataLoader reads no store by itself"},
            shared=True,
        ),
    )
}


def find_peer(name: str) -> Peer:
    """Raises ConfigError where there is no such peer."""
    if name not in PEERS:
        raise ConfigError(f"--against {name}: unknown; the peers are {', '.join(PEERS)}{did_you_mean(name, PEERS)}")
    return PEERS[name]

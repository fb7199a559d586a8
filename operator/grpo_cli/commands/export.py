"""`grpo export`: downloads the trained model of a job from its volume or object store into a local
folder.

`kubectl cp` needs a running pod, restarts after each lost connection and checks nothing. This
command creates a pod, resumes interrupted files, and compares every file with the hash that the
trainer recorded.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from grpo_api.job_object import GRPOJob
from grpo_api.report.artifacts import Export, Listing
from grpo_api.text.quantity import format_bytes

from ..cluster import kubectl
from ..cluster.delivery import DTYPE_BYTES
from ..cluster.delivery_pod import add_pod_arguments, start_delivery
from ..cluster.download import download_files, missing_files, require_folder, require_room
from ..inputs.integrity import require_made_of
from ..show.errors import KubectlError, NotYet, OptionError
from ..show.terminal import byte_progress, console


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("name", help="name of the GRPOJob")
    parser.add_argument(
        "--to",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder for the model; made if missing",
    )
    parser.add_argument(
        "--merge", action="store_true", help="merge the adapter into its base, in the cluster"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPE_BYTES,
        help="convert the weights, in the cluster. Unset: as they are",
    )
    add_pod_arguments(parser)


def run(options: Namespace) -> int:
    """Brings the model; where it was interrupted, the same command goes on."""
    listing, export = fetch_model(options)
    is_converted = is_conversion_requested(options, export)
    what = "converted from the job's" if is_converted else "as the job reported it"
    console().print(
        f"{format_bytes(listing.bytes)} in {options.to}, every file checked; weights "
        f"{listing.weights_hash}, {what}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def fetch_model(options: Namespace) -> tuple[Listing, Export]:
    """Download a job's model into the folder `options.to`; return what is there now, and what the
    job reported.

    Raises:
        NotYet: the job has no exported model.
        OptionError: it can't be had in the asked form.
        KubectlError: the cluster does not give it.
    """
    metadata, job = kubectl.get_job(options, options.name)
    export = exported_model(options.name, job)
    require_folder(options.to)
    converts = is_conversion_requested(options, export)
    with start_delivery(
        options, metadata, job, merge=options.merge, dtype=options.dtype
    ) as delivery:
        listing = delivery.wait_for_listing()
        if not converts:
            require_reported(listing, export)
        wanted = missing_files(options.to, listing)
        require_room(options.to, wanted)
        with byte_progress(f"{len(listing.files)} files", listing.bytes) as report_bytes:
            report_bytes(listing.bytes - sum(entry.bytes for entry in wanted.values()))
            download_files(options.to, wanted, delivery.read_file, report_bytes)
        if converts:
            require_made_of(options.to, export.weights_hash)
    return listing, export


def exported_model(name: str, job: GRPOJob) -> Export:
    """Return the model that the job has exported to its volume or object store.

    Raises:
        NotYet: the job has no exported model, or it is on the hub; the message names what exists.
    """
    status, phase = job.status, str(job.status.phase or "Pending")
    if status.export and status.export.to != "Hub":
        return status.export
    if status.export:
        raise NotYet(f"the model of {name} is at {status.export.path}: fetch it there")
    if phase == "Succeeded":
        raise NotYet(
            f"{name} kept no model: status.export is empty, since its spec.export keeps none"
        )
    checkpoint = status.checkpoint
    newest = (
        f"its newest checkpoint, step {checkpoint.step} at {checkpoint.where},"
        if checkpoint
        else "what it has"
    )
    if phase == "Failed":
        raise NotYet(
            f"{name} failed before its model was exported; {newest} is training state and no "
            "model: let it go on by raising spec.retry, or a new job by resumeFrom.grpoJob"
        )
    step = f" at step {status.progress.summary}" if status.progress else ""
    raise NotYet(
        f"{name} is {phase}{step}; the model is exported after the last step: "
        f"kubectl wait --for=condition=Finished grpojob/{name}"
    )


def is_conversion_requested(options: Namespace, export: Export) -> bool:
    """Return True if the options ask for another form of the model than the export has.

    Raises:
        OptionError: it can't be had so.
    """
    if options.merge and export.format == "Model":
        raise OptionError(
            f"--merge: {options.name} has exported a whole model, there is no adapter to merge"
        )
    if options.dtype and export.format == "Adapter" and not options.merge:
        raise OptionError(
            f"--dtype {options.dtype}: {options.name} has exported an adapter; add --merge"
        )
    return options.merge or options.dtype is not None


def require_reported(listing: Listing, export: Export) -> None:
    """Make sure that what is there is what the job says that it has exported.

    Raises:
        KubectlError: the weights are others.
    """
    listed, reported = listing.weights_hash, export.weights_hash
    if listed != reported:
        raise KubectlError(
            f"{export.path} has weights {listed}, the job reported {reported}: somebody changed it"
        )

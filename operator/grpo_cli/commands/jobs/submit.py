"""`grpo submit`: creates the objects of a file once its jobs are without mistakes, and may wait for
their end."""

import re
from argparse import ArgumentParser, Namespace

from grpo_api.text.contract import GROUP, KIND

from ...cluster import kubectl
from ...cluster.clock import SYSTEM_CLOCK
from ...cluster.job_end import add_timeout, wait_for_end
from ...inputs.manifest import add_filename, load_specs, read_stdin
from ...show.errors import KubectlExitError, OptionError


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_filename(parser, required=True)
    parser.add_argument(
        "--wait", action="store_true", help="wait for the end; exit code 1 if a job fails"
    )
    add_timeout(parser)
    kubectl.add_arguments(parser)


def run(options: Namespace) -> int:
    """Creates all objects. 0, or with --wait the exit code of the first job that did not
    succeed."""
    if options.timeout is not None and not options.wait:
        raise OptionError("--timeout goes with --wait: without it nothing is waited for")
    # standard input can be read once, and kubectl needs it, too
    stdin = read_stdin() if options.filename == "-" else None
    jobs = load_specs(options.filename, stdin)
    try:
        created = kubectl.run_kubectl(
            options, "create", f"--filename={options.filename}", stdin=stdin
        )
    except KubectlExitError as error:
        # One object is refused, such as a claim that exists, and kubectl has created the others.
        print(error.output, end="")
        raise
    print(created, end="")
    if not options.wait:
        return 0
    began_at = SYSTEM_CLOCK.now()
    codes = []
    # kubectl names the objects in the file's order; the API server makes names of generateName
    names = re.findall(rf"^{KIND.lower()}\.{GROUP}/(\S+)", created, re.MULTILINE)
    for name, job in zip(names, jobs, strict=True):
        namespace = options.namespace or job.metadata.get("namespace")
        job_options = Namespace(**{**vars(options), "namespace": namespace})
        codes.append(wait_for_end(job_options, name, began_at=began_at))
    return next(filter(None, codes), 0)

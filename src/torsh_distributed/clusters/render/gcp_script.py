"""Compute Engine: machines with a compact placement policy and gVNIC, started by the `gcloud` command."""

from __future__ import annotations

from torsh_distributed.clusters.render.node_script import (
    FIELD_FUNCTION,
    is_spot,
    launch_script,
    node_file,
    read_settings,
    up_or_down,
)
from torsh_distributed.clusters.render.rendered_files import RenderedFile, folded
from torsh_distributed.clusters.submission import Submission

_SETTINGS = {
    "project": "the project (required)",
    "service_account": "the account of the machines, which may read the job's secret (required)",
    "zone": "the zone (us-central1-a)",
    "network": "the network (default)",
    "vm_image": "family of the machine's system image; the default has Docker and, with GPUs, the driver",
    "vm_image_project": "where that family is",
}
_PLACE = (
    "# Its place: the launch script gave every machine its rank; names are addresses inside the network.",
    "imds=http://169.254.169.254/computeMetadata/v1",
    'ask() { curl -sf -H "Metadata-Flavor: Google" "$imds/$1"; }',
    "node_rank=$(ask instance/attributes/torsh-rank)",
    "master=$(ask instance/attributes/torsh-master)",
    "secret=$(ask instance/attributes/torsh-secret)",
    *FIELD_FUNCTION,
    "access=$(ask instance/service-accounts/default/token | field access_token)",
    "# The header goes through a descriptor: arguments are visible to every user of the machine.",
    'curl -sf -H @<(printf "Authorization: Bearer %s" "$access") \\',
    '  "https://secretmanager.googleapis.com/v1/$secret/versions/latest:access" | field data | base64 -d > "$token"',
)


def render_gcp(submission: Submission) -> list[RenderedFile]:
    """`launch-gcp.sh up|down` and the `node.sh` that its machines run."""
    options = read_settings("gcp", submission, _SETTINGS, "project", "service_account")
    has_gpus = submission.gpus_per_worker > 0
    settings = {
        "name": submission.name,
        "count": str(submission.nodes),
        "type": options.get("instance_type", "a3-highgpu-8g" if has_gpus else "c3-standard-8"),
        "project": options["project"],
        "zone": options.get("zone", "us-central1-a"),
        "network": options.get("network", "default"),
        "account": options["service_account"],
        "image_family": options.get("vm_image", "common-cu129-ubuntu-2204-nvidia-580" if has_gpus else "cos-stable"),
        "image_project": options.get("vm_image_project", "deeplearning-platform-release" if has_gpus else "cos-cloud"),
    }
    return [
        launch_script("gcp", settings, ["region=${zone%-*}", "", *up_or_down(_up(options), _DOWN)]),
        node_file(submission, "gcp", _PLACE),
    ]


def _up(options: dict[str, str]) -> list[str]:
    command = ["gcloud", "compute", "instances", "create", '"$name-$rank"', "--project", '"$project"']
    command += ["--zone", '"$zone"', "--machine-type", '"$type"', "--resource-policies", '"$name"']
    command += ["--image-family", '"$image_family"', "--image-project", '"$image_project"']
    command += ["--boot-disk-size", "200GB", "--network-interface", '"network=$network,nic-type=GVNIC"']
    command += ["--service-account", '"$account"', "--scopes", "cloud-platform", "--tags", '"$name"']
    # Machines with GPUs cannot move while they run.
    command += ["--maintenance-policy", "TERMINATE"]
    command += ["--metadata", '"torsh-rank=$rank,torsh-master=$master,torsh-secret=$secret"']
    command += ["--metadata-from-file", '"startup-script=$here/node.sh"']
    if is_spot(options):
        command += ["--provisioning-model", "SPOT", "--instance-termination-action", "DELETE"]
    return [
        'gcloud compute resource-policies create group-placement "$name" --project "$project" --region "$region" \\',
        '  --collocation collocated --vm-count "$count"',
        "# All traffic, but between these machines alone.",
        'gcloud compute firewall-rules create "$name" --project "$project" --network "$network" --allow all \\',
        '  --source-tags "$name" --target-tags "$name"',
        "openssl rand -hex 32 |",
        '  gcloud secrets create "$name-token" --project "$project" --data-file=-',
        'gcloud secrets add-iam-policy-binding "$name-token" --project "$project" \\',
        '  --member "serviceAccount:$account" --role roles/secretmanager.secretAccessor',
        'secret="projects/$project/secrets/$name-token"',
        'master="$name-0.$zone.c.$project.internal"',
        "for ((rank = 0; rank < count; rank++)); do",
        "  " + folded(command, indent="    "),
        "done",
    ]


_DOWN = [
    "for ((rank = 0; rank < count; rank++)); do",
    "  # One that was taken back is gone already.",
    '  gcloud compute instances delete "$name-$rank" --project "$project" --zone "$zone" --quiet || true',
    "done",
    'gcloud compute firewall-rules delete "$name" --project "$project" --quiet',
    'gcloud compute resource-policies delete "$name" --project "$project" --region "$region" --quiet',
    'gcloud secrets delete "$name-token" --project "$project" --quiet',
]

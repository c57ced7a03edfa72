"""EC2: machines in a cluster placement group, with EFA where they have it, started by the `aws` command."""

from __future__ import annotations

from torsh_distributed.clusters.render.node_script import (
    is_spot,
    launch_script,
    node_file,
    read_settings,
    up_or_down,
)
from torsh_distributed.clusters.render.rendered_files import RenderedFile, folded
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import InvalidArgument

_SETTINGS = {
    "subnet": "the subnet that the machines are in (required)",
    "instance_profile": "the instance profile that may read the job's secret (required)",
    "region": "the region (us-east-1)",
    "ami": "the machine image; `resolve:ssm:PARAMETER` takes the newest",
    "efa_cards": "EFA interfaces of a machine: 0 for none, 32 for p5.48xlarge (1 with GPUs)",
    "key_name": "an SSH key of yours",
}
_GPU_AMI = "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
_CPU_AMI = "resolve:ssm:/aws/service/ecs/optimized-ami/amazon-linux-2023/recommended/image_id"
_PLACE = (
    "# Its place: tags say where node 0 is and which rank this start of machines begins with.",
    "imds=http://169.254.169.254/latest",
    'session=$(curl -sf -X PUT "$imds/api/token" -H "X-aws-ec2-metadata-token-ttl-seconds: 300")',
    'ask() { curl -sf -H "X-aws-ec2-metadata-token: $session" "$imds/meta-data/$1"; }',
    "name=$(ask tags/instance/torsh-job)",
    "first=$(ask tags/instance/torsh-first)",
    "node_rank=$((first + $(ask ami-launch-index)))",
    "master=$(ask tags/instance/torsh-master || ask local-ipv4)",
    "AWS_DEFAULT_REGION=$(ask placement/region)",
    "export AWS_DEFAULT_REGION",
    'aws secretsmanager get-secret-value --secret-id "$name-token" --query SecretString --output text > "$token"',
)


def render_aws(submission: Submission) -> list[RenderedFile]:
    """`launch-aws.sh up|down` and the `node.sh` that its machines run."""
    options = read_settings("aws", submission, _SETTINGS, "subnet", "instance_profile")
    has_gpus = submission.gpus_per_worker > 0
    cards = options.get("efa_cards", "1" if has_gpus else "0")
    if not cards.isdigit():
        raise InvalidArgument("efa_cards must be a number", efa_cards=cards)
    settings = {
        "name": submission.name,
        "count": str(submission.nodes),
        "type": options.get("instance_type", "p5.48xlarge" if has_gpus else "c7i.4xlarge"),
        "ami": options.get("ami", _GPU_AMI if has_gpus else _CPU_AMI),
        "subnet": options["subnet"],
        "profile": options["instance_profile"],
        "AWS_DEFAULT_REGION": options.get("region", "us-east-1"),
    }
    devices = [f"--device=/dev/infiniband/uverbs{card}" for card in range(int(cards))]
    body = ["export AWS_DEFAULT_REGION", "", *_start_function(options, int(cards)), ""]
    return [
        launch_script("aws", settings, body + up_or_down(_up(submission), _DOWN)),
        node_file(submission, "aws", _PLACE, devices=devices),
    ]


def _start_function(options: dict[str, str], cards: int) -> list[str]:
    """A function of the script: start so many machines, whose first has that rank."""
    if cards:
        # Every card after the first is a second device of its machine.
        interfaces = [
            f'"NetworkCardIndex={card},DeviceIndex={min(card, 1)},InterfaceType=efa,Groups=$group,SubnetId=$subnet"'
            for card in range(cards)
        ]
        network = ["--network-interfaces", *interfaces]
    else:
        network = ["--subnet-id", '"$subnet"', "--security-group-ids", '"$group"']
    command = ["aws", "ec2", "run-instances", "--count", '"$1"', "--image-id", '"$ami"', "--instance-type", '"$type"']
    command += [*network, "--placement", '"GroupName=$name"', "--iam-instance-profile", '"Name=$profile"']
    command += ["--metadata-options", "HttpTokens=required,InstanceMetadataTags=enabled"]
    command += ["--user-data", '"file://$here/node.sh"', "--tag-specifications"]
    command += ['"ResourceType=instance,Tags=[{Key=torsh-job,Value=$name},{Key=torsh-first,Value=$2}$3]"']
    if is_spot(options):
        # One-time: the machine is not brought back by itself, the job is started again from its checkpoint.
        command += ["--instance-market-options", "'MarketType=spot,SpotOptions={SpotInstanceType=one-time}'"]
    if "key_name" in options:
        command += ["--key-name", options["key_name"]]
    command += ["--query", "'Instances[0].PrivateIpAddress'", "--output", "text"]
    return [
        "# start COUNT FIRST_RANK MORE_TAGS: prints the address of the first of them",
        "start() {",
        "  " + folded(command, indent="    "),
        "}",
    ]


def _up(submission: Submission) -> list[str]:
    lines = [
        'vpc=$(aws ec2 describe-subnets --subnet-ids "$subnet" --query "Subnets[0].VpcId" --output text)',
        'group=$(aws ec2 create-security-group --group-name "$name" --description "training job $name" \\',
        '  --vpc-id "$vpc" --query GroupId --output text)',
        "# All traffic, but between these machines alone; EFA needs the rule for both ways.",
        'aws ec2 authorize-security-group-ingress --group-id "$group" --protocol all --source-group "$group"',
        'aws ec2 authorize-security-group-egress --group-id "$group" --protocol all --source-group "$group"',
        'aws ec2 create-placement-group --group-name "$name" --strategy cluster',
        "openssl rand -hex 32 |",
        '  aws secretsmanager create-secret --name "$name-token" --secret-string file:///dev/stdin',
        'master=$(start 1 0 "")',
        'echo "node 0: $master"',
    ]
    if submission.nodes > 1:
        lines.append('start "$((count - 1))" 1 ",{Key=torsh-master,Value=$master}"')
    return lines


_DOWN = [
    'ids=$(aws ec2 describe-instances --filters "Name=tag:torsh-job,Values=$name" \\',
    '  "Name=instance-state-name,Values=pending,running,stopping,stopped" \\',
    '  --query "Reservations[].Instances[].InstanceId" --output text)',
    'if [[ -n "$ids" ]]; then',
    "  # shellcheck disable=SC2086 # one word per machine",
    "  aws ec2 terminate-instances --instance-ids $ids",
    "  # shellcheck disable=SC2086",
    "  aws ec2 wait instance-terminated --instance-ids $ids",
    "fi",
    'aws ec2 delete-placement-group --group-name "$name"',
    'aws secretsmanager delete-secret --secret-id "$name-token" --force-delete-without-recovery',
    'group=$(aws ec2 describe-security-groups --filters "Name=group-name,Values=$name" \\',
    '  --query "SecurityGroups[0].GroupId" --output text)',
    'aws ec2 delete-security-group --group-id "$group"',
]

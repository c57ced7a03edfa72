from torsh_distributed.clusters.cluster_engine import ClusterEngine as ClusterEngine
from torsh_distributed.clusters.cluster_engine import JobState as JobState
from torsh_distributed.clusters.cluster_engine import JobStatus as JobStatus
from torsh_distributed.clusters.submission import Submission as Submission

"""The public names, by the module that has each: for type checkers, and read by `__init__.py`."""

from yafsdp_fn import (
    checkpoint as checkpoint,
)
from yafsdp_fn import (
    errors as errors,
)
from yafsdp_fn import (
    formats as formats,
)
from yafsdp_fn import (
    optim as optim,
)
from yafsdp_fn import (
    params as params,
)
from yafsdp_fn import (
    planner as planner,
)
from yafsdp_fn import (
    schedules as schedules,
)
from yafsdp_fn import (
    timeline as timeline,
)
from yafsdp_fn.api.checksum import checksum as checksum
from yafsdp_fn.api.chunk import chunk as chunk
from yafsdp_fn.api.launch import launch as launch
from yafsdp_fn.api.mesh import mesh as mesh
from yafsdp_fn.api.named_weights import named_weights as named_weights
from yafsdp_fn.api.scan import apply as apply
from yafsdp_fn.api.scan import scan as scan
from yafsdp_fn.api.sharding import init as init
from yafsdp_fn.api.sharding import shard as shard
from yafsdp_fn.api.sharding import unshard as unshard
from yafsdp_fn.api.train_step import train_step as train_step
from yafsdp_fn.api.transform import (
    eval_step as eval_step,
)
from yafsdp_fn.api.transform import (
    functional_loss as functional_loss,
)
from yafsdp_fn.api.transform import (
    grad as grad,
)
from yafsdp_fn.api.transform import (
    value_and_grad as value_and_grad,
)
from yafsdp_fn.communication.axes import (
    all_gather as all_gather,
)
from yafsdp_fn.communication.axes import (
    all_to_all as all_to_all,
)
from yafsdp_fn.communication.axes import (
    axis_index as axis_index,
)
from yafsdp_fn.communication.axes import (
    axis_size as axis_size,
)
from yafsdp_fn.communication.axes import (
    pmax as pmax,
)
from yafsdp_fn.communication.axes import (
    ppermute as ppermute,
)
from yafsdp_fn.communication.axes import (
    psum as psum,
)
from yafsdp_fn.communication.axes import (
    psum_scatter as psum_scatter,
)
from yafsdp_fn.communication.formats import Wire as Wire
from yafsdp_fn.modules.functionalize import functionalize as functionalize
from yafsdp_fn.modules.functionalize import load_into as load_into
from yafsdp_fn.modules.lora import lora as lora
from yafsdp_fn.modules.lora import merge_lora as merge_lora
from yafsdp_fn.nn.linear import embedding as embedding
from yafsdp_fn.nn.linear import linear as linear
from yafsdp_fn.nn.linear import linear_cross_entropy as linear_cross_entropy
from yafsdp_fn.nn.low_rank import LowRank as LowRank
from yafsdp_fn.params.algebra import global_norm as global_norm
from yafsdp_fn.params.algebra import normal_like as normal_like
from yafsdp_fn.params.algebra import vdot as vdot
from yafsdp_fn.params.markers import Pinned as Pinned
from yafsdp_fn.params.markers import Stacked as Stacked
from yafsdp_fn.params.markers import Unit as Unit
from yafsdp_fn.params.markers import frozen as frozen
from yafsdp_fn.params.precision import Precision as Precision
from yafsdp_fn.params.sharded import Sharded as Sharded
from yafsdp_fn.params.sources import Lazy as Lazy
from yafsdp_fn.params.sources import materialize as materialize
from yafsdp_fn.params.tree import Param as Param
from yafsdp_fn.program.program import Program as Program
from yafsdp_fn.proof.verify import verify as verify
from yafsdp_fn.runtime.batch import shard_batch as shard_batch
from yafsdp_fn.runtime.plain_state import PlainState as PlainState
from yafsdp_fn.runtime.reductions import Max as Max
from yafsdp_fn.runtime.reductions import Mean as Mean
from yafsdp_fn.runtime.reductions import Sum as Sum
from yafsdp_fn.runtime.state import ShardedState as ShardedState
from yafsdp_fn.runtime.whole_layers import map_whole_layers as map_whole_layers

__version__: str

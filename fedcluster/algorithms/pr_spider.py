"""PR-SPIDER. Sharma, Kafle, Khanduri, Bulusu, Rajawat, Varshney: Parallel Restarted SPIDER - Communication Efficient
Distributed Nonconvex Optimization with Optimal Computation Complexity, 2019.

Every cycle is a restart. The cohort uploads its gradients at W, whose average is v_0. Then each device computes

    w_1 = W - lr v_0
    v_t = g_t(w_t) - g_t(w_{t-1}) + v_{t-1}        both gradients on batch t
    w_{t+1} = w_t - lr v_t                         E steps in all; the first needs no batch

In the paper several communications follow a restart. Here it is one, because the next cohort belongs to another
cluster, and v does not estimate that cluster's gradient.
"""

from torch import Tensor

from fedcluster.algorithms.fedsvrg import FedSvrg
from fedcluster.experiment import Section
from fedcluster.models.flat_model import FlatModel
from fedcluster.models.local_sgd import Batches, local_sgd
from fedcluster.state import Tensors


class PRSpider(FedSvrg):
    name = "pr_spider"

    @classmethod
    def local_optimizers(cls, options: Section) -> tuple[str, ...]:
        return ("sgd",)

    def train(self, flat_model: FlatModel, received: Tensors, batches: Batches, device_state: Tensors) -> Tensors:
        before: Tensor | None = None
        v = received["gradient"]

        def recur(gradient: Tensor, w: Tensor, start: Tensor) -> None:
            nonlocal before, v
            if before is not None:
                v = gradient.sub(flat_model.gradient_at(before)).add_(v)
            before = w.clone()
            gradient.copy_(v)

        return {"model": local_sgd(flat_model, received["model"], batches, correct=recur)}

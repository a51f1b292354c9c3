"""Native sparse attention: block selection."""

import torch

from meta_kernels.attention.nsa_topk import check_parameters, infer_nsa_topk
from ops_registry.attention.nsa_topk import NSA_TOPK
from ops_registry.contract import register
from ops_registry.targets import Target
from tileops.op import Op

KERNELS = ("triton", "reference")

register(NSA_TOPK, infer_nsa_topk, KERNELS, package="tileops.kernels.attention.nsa_topk")


class NSATopKVarlenFwdOp(Op):
    r"""Choose, for each token and key/value head, the blocks that sparse attention will read.

    The token at position t may choose among the blocks 0 to cur = t // bs of its request. Its
    query is scaled first and rounded to its own dtype; block c then scores the attention that
    the g = H / H_kv heads of the group give its compressed key, normalized over the chunks
    closed at t:

    .. math::

        q' = round(scale \cdot q), \qquad
        p_{h,c} = softmax_{c < \lfloor (t + 1) / bs \rfloor} \langle q'_h, k_c \rangle, \qquad
        score_c = \sum_{h \in group} p_{h,c}

    The first, the previous and the current block score g, the most there is. The blocks of
    highest score are returned by descending score; of equal ones, which are chosen and in what
    order is unspecified (here the lower id first).

    Args:
        scale: factor of q, finite and > 0.
        selected_block_num: width of the answer, >= 1.
        bs: tokens per block, >= 1.
        target: a target name, BUILTIN, or None to decide from the device of the inputs.

    Raises:
        ValueError: a parameter is outside its range.
        TypeError: a parameter has the wrong type.
    """

    contract = NSA_TOPK
    PARAMETERS = ("scale", "selected_block_num", "bs")

    def __init__(
        self, scale: float, selected_block_num: int, bs: int, *, target: Target = None
    ) -> None:
        super().__init__(target)
        self.scale = self._number("scale", scale)
        self.selected_block_num = self._integer("selected_block_num", selected_block_num)
        self.bs = self._integer("bs", bs)
        check_parameters(self.scale, self.selected_block_num, self.bs)

    def options(self) -> tuple[float, int, int]:
        return self.scale, self.selected_block_num, self.bs

    def forward(
        self,
        q: torch.Tensor,
        k_cmp: torch.Tensor,
        offsets: torch.Tensor,
        chunk_offsets: torch.Tensor,
        token_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Return block_indices, int32 [T, H_kv, selected_block_num].

        Ids count from the request's first block. Slots beyond the available blocks hold -1, as
        do rows past the last offset.

        Args:
            q: packed queries [T, H, D], float16 or bfloat16.
            k_cmp: compressed keys [C, H_kv, D], q's dtype; H_kv divides H.
            offsets: int32 [N + 1], prefix sums of the request lengths: 0, ..., T.
            chunk_offsets: int32 [N + 1], prefix sums of ceil(length / bs): 0, ..., C.
            token_indices: int32 [T, 2], request id and position of each token. The three
                metadata tensors must agree; their contents are not checked.

        Raises:
            ValueError: shapes, dtypes or devices break the contract.
            TypeError: an argument is not a tensor.
        """
        block_indices: torch.Tensor = self.call(q, k_cmp, offsets, chunk_offsets, token_indices)
        return block_indices

"""Contract of `mla_decode_fwd`: latent attention of one query token per request."""

from ops_registry.accuracy import FORWARD
from ops_registry.contract import HALF, OpContract, TensorSpec, define

MLA_DECODE_FWD = define(
    OpContract(
        name="mla_decode_fwd",
        op_class="MLADecodeWithKVCacheFwdOp",
        summary="Multi-head latent attention of one query token per request.",
        signature='(Tensor q, Tensor q_pe, Tensor k, Tensor k_pe, str target="") -> Tensor',
        letters={
            "B": "requests",
            "H": "query heads",
            "H_kv": "latent heads, a divisor of H",
            "D": "latent dim, of keys and values",
            "PE": "rotary dim, of keys only; may be 0",
            "N_kv": "cached tokens, all visible",
        },
        tensors={
            "q": TensorSpec("B H D", HALF, "queries in the latent space (absorbed form)"),
            "q_pe": TensorSpec("B H PE", "q", "rotated part of the queries"),
            "k": TensorSpec("B N_kv H_kv D", "q", "latent cache: keys and values"),
            "k_pe": TensorSpec("B N_kv H_kv PE", "q", "rotated part of the keys"),
        },
        returns={"o": TensorSpec("B H D", "q", "attention output in the latent space")},
        accuracy={"16-bit": FORWARD},
    )
)

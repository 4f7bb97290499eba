from jaxtwin.configs import GQA, RMS, Block, Glu, Model, Rope, Run

norm = RMS(eps=1e-6, offset=True)
attn = GQA(heads=4, kv=2, width=8, rope=Rope(base=500_000.0, pairs="half"))
block = Block(pre_attn=norm, attn=attn, pre_ffn=norm, ffn=Glu(hidden=40, act="gelu_tanh"))
SPEC = Model(d=32, vocab=61, max_len=64, norm=norm, tied=False,
             runs=(Run(blocks=(block,), repeats=3),))  # fmt: skip
OURS = "layers.{l}."
NAMES = {
    "table": "embed.weight",
    "scale": "norm.weight",
    "unembed": "head.weight.T",
    "stack.{l}.scale_1": OURS + "pre_attn.weight",
    "stack.{l}.scale_2": OURS + "pre_ffn.weight",
    "stack.{l}.qkv": {"of": [f"{OURS}attn.{part}.weight" for part in "qkv"], "axes": "d (k j h)"},
    "stack.{l}.mix": OURS + "attn.o.weight.T",
    "stack.{l}.gate_up": [OURS + "ffn.gate.weight.T", OURS + "ffn.up.weight.T"],
    "stack.{l}.down": OURS + "ffn.down.weight.T",
}

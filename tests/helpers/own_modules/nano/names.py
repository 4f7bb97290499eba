from jaxtwin.configs import GQA, LN, Block, Learned, Mlp, Model, Run

norm = LN(eps=1e-5)
attn = GQA(heads=4, kv=4, width=8, rope=None, bias=True, out_bias=True)
block = Block(pre_attn=norm, attn=attn, pre_ffn=norm, ffn=Mlp(hidden=128, act="gelu", bias=True))
SPEC = Model(d=32, vocab=61, max_len=32, position=Learned(), norm=norm, tied=True,
             runs=(Run(blocks=(block,), repeats=3),))  # fmt: skip
NAMES = {"transformer.wte.weight": "embed.weight", "transformer.wpe.weight": "position.weight",
         "lm_head.weight": "embed.weight", "transformer.h.{l}.attn.bias": None}  # fmt: skip
for theirs, ours in {"h.{l}.ln_1": "layers.{l}.pre_attn", "h.{l}.ln_2": "layers.{l}.pre_ffn",
                     "ln_f": "norm"}.items():  # fmt: skip
    NAMES[f"transformer.{theirs}.weight"] = f"{ours}.weight"
    NAMES[f"transformer.{theirs}.bias"] = f"{ours}.bias.weight"
for each in ("weight", "bias"):
    theirs, ours = "transformer.h.{l}", "layers.{l}"
    NAMES[f"{theirs}.attn.c_attn.{each}"] = [f"{ours}.attn.{part}.{each}" for part in "qkv"]
    NAMES[f"{theirs}.attn.c_proj.{each}"] = f"{ours}.attn.o.{each}"
    NAMES[f"{theirs}.mlp.c_fc.{each}"] = f"{ours}.ffn.up.{each}"
    NAMES[f"{theirs}.mlp.c_proj.{each}"] = f"{ours}.ffn.down.{each}"

from jaxtwin.configs.llama import llama

SPEC = llama(vocab=61, d=32, layers=3, heads=4, kv=4, hidden=32, max_len=64, base=1e4, eps=1e-6,
             tied=False, pairs="adjacent")  # fmt: skip
NAMES = {"e.weight": "embed.weight", "s.g": "norm.weight", "o.weight": "head.weight", "turn": None}
PARTS = {"s0.g": "pre_attn.weight", "p0.m.weight": "attn.v.weight", "p1.m.weight": "attn.q.weight",
         "p2.m.weight": "attn.k.weight", "p3.m.weight": "attn.o.weight", "s1.g": "pre_ffn.weight",
         "p4.m.weight": "ffn.up.weight", "p5.m.weight": "ffn.down.weight",
         "p6.m.weight": "ffn.gate.weight"}  # fmt: skip
NAMES |= {f"u.{{l}}.{theirs}": f"layers.{{l}}.{ours}" for theirs, ours in PARTS.items()}

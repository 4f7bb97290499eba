from jaxtwin.configs.llama import llama


def spec():
    return llama(vocab=61, d=32, layers=3, heads=4, kv=2, hidden=48, max_len=64, base=10_000.0,
                 eps=1e-5, tied=True, pairs="adjacent")  # fmt: skip

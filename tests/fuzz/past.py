"""Numbers of cases that once ended wrongly, each for another reason."""

PAST: dict[str, tuple[int, ...]] = {
    "beside_tokenizer": (3, 235),
    "chat_template_jinja": (15, 27, 89, 195, 206, 295, 315, 469, 501, 521, 755, 840, 1698),
    "chat_template_json": (43,),
    "config_toml": (1152,),
    "gguf_model": (45, 4545),
    "gguf_tokenizer": (188, 213, 300, 344, 461, 518, 614, 846, 887, 1012, 1038, 1118, 1436, 1945),
    "llama2c_v0": (945,),
    "llama2c_v1": (84,),
    "meta_npy": (6263,),
    "sentencepiece_model": (9, 13, 28),
    "tiktoken_model": (1,),
    "tokenizer_json": (107, 581, 1254, 1643, 1658, 2042),
    "vocab_and_merges": (141, 299, 697, 1400, 1437, 1844, 1974),
}

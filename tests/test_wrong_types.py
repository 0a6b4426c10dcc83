"""Arguments of the wrong type, as a user gives them: in a process without shape checks."""

import json
import subprocess
import sys

import pytest

CASES = {
    "cw_lens.capture(Linear(2, 2), text)": "a Linear is no TransformerLens model. Load one with",
    "cw_lens.capture(None, text)": "a NoneType is no TransformerLens model. Load one with load_m",
    "cw_lens.capture(raw, text)": "a LlamaForCausalLM is no TransformerLens model. Load one with",
    "cw_lens.next_token_nll(raw, text)": "a LlamaForCausalLM is no TransformerLens model.",
    "cw_lens.find_sinks(raw, text)": "a LlamaForCausalLM is no TransformerLens model.",
    "cw_lens.explain(raw, text)": "a LlamaForCausalLM is no TransformerLens model.",
    "cw_lens.from_cache({}, raw, text)": "a LlamaForCausalLM is no TransformerLens model.",
    "cw_lens.masked_values(raw, {}).__enter__()": "a LlamaForCausalLM is no TransformerLens",
    "cw_lens.capture(llama, 'hello')": "the prompts are a str. Make them for this model with token",
    "cw_lens.capture(llama, images)": "the prompts are those of another kind of model. Make them",
    "cw_lens.capture(vit, text)": "another kind of model. Make them for this model with prompts_fr",
    "cw_lens.capture(llama, text, layers='0')": "layers is '0'; it must hold whole numbers from 0",
    "cw_lens.capture(llama, text, layers=[0.5])": "layers is [0.5]; it must hold whole numbers",
    "cw_lens.capture(llama, text, layers=3)": "layers is 3; it must hold whole numbers from 0 to 1",
    "cw_lens.capture(llama, text, layers=[True])": "layers is [True]; it must hold whole numbers",
    "cw_lens.explain(llama, text, layers=[None])": "layers is [None]; it must hold whole numbers",
    "cw_lens.explain(jamba, text, layers=[0])": "layer 0 has no attention",
    "cw_lens.from_cache(None, llama, text)": "cache is a NoneType; it must be the ActivationCache",
    "cw_lens.from_cache(cut('z', 0), llama, text)": "layer 0: the cached z has shape (0, 9, 32)",
    "cw_lens.from_cache(cut('v', 1), llama, text)": "layer 0: the cached value has shape (1, 8, ",
    "cw_lens.prompts_from_images(vit, [[0.0]])": "pixels are list; the model takes a float tensor",
    "cw_lens.prompts_from_images(vit, torch.zeros(1, 3, 8, 8).byte())": "pixels are torch.uint8",
    "enter(0.0, {0: torch.ones(1, 4, 9)})": "layer 0: the mask is a torch.float32 tensor of shape",
    "enter(0.0, {0: torch.ones(9).bool()})": "layer 0: the mask is a torch.bool tensor of shape (9",
    "enter(0.0, {0: [True]})": "layer 0: the mask is a list; it must be a torch.bool tensor of",
    "enter(0.0, [marks])": "where is a list; it must map layers to masks, such as",
    "enter(0.0, {True: marks})": "layer True has no attention to write into; those that have are",
    "enter(0.0, {2: marks})": "layer 2 has no attention to write into; those that have are 0 to 1",
    "enter(float('nan'), {0: marks})": "the factor is nan; it must be a finite number",
    "enter('0', {0: marks})": "the factor is '0'; it must be a finite number, such as 0 or 0.5",
    "study(fractions=0.5)": "the fractions are 0.5; give at least one above 0 and up to 1",
    "study(fractions=['a'])": "the fractions are ['a']; give at least one above 0 and up to 1",
    "study(seeds='3')": "'3' seeds of the random control are too few; use 3 or more",
    "study(batch_size=1.5)": "a batch size of 1.5: give at least one text and a batch size of",
    "study(metrics={'mine': 5})": "metric 'mine' is a int; it must be a function of a Layer",
    "study(metrics=5)": "metrics is a int; give names out of METRICS, or a mapping of names",
    "study(metrics={'mine': print})": "metric 'mine' returned a NoneType for layer 0; it must",
    "cw_lens.faithfulness(llama, 'hello')": "the prompts are a str. Make them for this model wi",
    "cw_lens.faithfulness(raw, text)": "a LlamaForCausalLM is no TransformerLens model.",
    "cw_lens.sink_profile(llama, 'hello')": "the prompts are a str. Make them for this model wi",
    "cw_lens.sink_sweep(raw, text, [0])": "a LlamaForCausalLM is no TransformerLens model.",
    "cw_lens.sweep_curves(None)": "units is a NoneType; it must be the table of a Sweep's units.",
    "cw_lens.removal_plan(llama, 'hello')": "the prompts are a str. Make them for this model wi",
    "cw_lens.removal_plan(llama, text, fraction='a')": "the fraction is 'a'; it must be from 0",
    "cw_lens.removal_plan(llama, text, 'random', seed='a')": "the seed is 'a'; it must be a who",
    "cw_lens.replaced_values(llama, {0: marks}, None).__enter__()": "values must map layers to",
    "cw_lens.replaced_values(llama, {0: marks}, {0: None}).__enter__()": "values must map layers",
    "cw_lens.removal_curves(None)": "units is a NoneType; it must be the table that faithfulnes",
    "cw_lens.load_corpus('samples', '3')": "examples is '3'; it must be a whole number from 1.",
    "cw_lens.load_corpus('samples', 10**30)": "it must be a whole number from 1.",
    "cw_lens.corpora.corpus_prompts(named, 'hi', None)": "max_tokens is None; it must be at lea",
    "cw_lens.corpora.corpus_prompts(named, ['a'], 5)": "the text is a list; give one text at a",
    "cw_lens.tokenize(named, 'a\\ud800')": "text 0 is not UTF-8 (surrogates not allowed). Give it",
    "study(metrics=[['attention']])": "unknown metric ['attention']; there are attention, value_we",
    "study(granularity=None)": "unknown granularity None; there are layer, head, global.",
    "study(protected=[{}])": "unknown protected {}; there are cosine, centred_cosine",
    "cw_lens.find_sinks(llama, text, [])": "unknown detector []; there are cosine, centred_cos",
    "cw_lens.capture(llama, text, space=marks)": "unknown space tensor(",
    "cw_lens.ValueEdit([])": "unknown kind of edit []; there are scale, random, keep_parallel",
    "cw_lens.EditPlan(text, [cw_lens.ValueEdit()], detector={})": "unknown detector {}; there are",
    "cw_lens.scaled_values(llama, 0.5, positions=[]).__enter__()": "unknown positions []; there",
    "sweep_conditions(targets=None)": "unknown targets None; there are first, sinks.",
    "sweep_conditions(surgery=[['mean']])": "unknown surgery ['mean']; there are keep_parallel,",
    "sweep_curves(None)": "units is a NoneType; it must be the table of a Sweep's units.",
    "cw_lens.doctor(raw)['attention'].what": "a LlamaForCausalLM is no TransformerLens model.",
}

SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.nn import Linear
import cw_lens
from cw_lens.errors import CWLensError
from cw_lens.studies.sweep_results import sweep_curves
from cw_lens.studies.sweeps import sweep_conditions
from tests.families import hf_model, prompts, wrapped
from tests.tiny import tiny_tokenizer

raw, llama, vit, jamba = hf_model("llama"), wrapped("llama"), wrapped("vit"), wrapped("jamba")
named = cw_lens.wrap_model(hf_model("llama"), tiny_tokenizer())
text, images = prompts(llama, (9,)), prompts(vit, (9,))
marks = torch.ones(1, 4, 9, dtype=torch.bool)
_, cache = llama.run_with_cache(text.ids)

def cut(part, axis):
    held = dict(cache.items())
    name = f"blocks.0.attn.hook_{part}"
    held[name] = held[name].narrow(axis, 0, held[name].shape[axis] - 1).flatten(2)
    return held

def enter(factor, where):
    cw_lens.scaled_values(llama, factor, where).__enter__()

def study(metrics=("attention",), **options):
    return cw_lens.faithfulness(llama, text, metrics, **options)

said = {}
for case in json.load(sys.stdin):
    try:
        said[case] = str(eval(case))
    except CWLensError as error:
        said[case] = str(error)
    except Exception as error:
        said[case] = f"UNCAUGHT {type(error).__name__}: {error}"
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(list(CASES)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_the_message_says_what_is_wrong_and_what_to_do(said, case):
    assert CASES[case] in said[case]

from pathlib import Path

import pytest

from rayrec.models.keras.build import build_keras_model
from rayrec.models.keras.config import KerasModelConfig
from rayrec.models.keras.runtime import load_keras, load_tensorflow
from rayrec.platform.devices import HOST, KINDS, device_named
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from tests.models.keras.impressions import DIM, SCHEMA
from tests.models.keras.programs import config, needs_tensorflow


def build(settings: KerasModelConfig):
    return build_keras_model(settings, SCHEMA, 0, HOST)


def of_builder(name: str, folder: Path | None = None) -> KerasModelConfig:
    return KerasModelConfig(name="keras", builder=name, folder=folder, dim=DIM)


def test_a_builder_has_the_form_of_module_and_function():
    with pytest.raises(InputError, match=r"builder must be 'module:function', got 'build'"):
        KerasModelConfig.parse({"name": "keras", "builder": "build"})


@needs_tensorflow
def test_a_builder_may_lie_in_a_folder_of_its_own(tmp_path):
    (tmp_path / "my_keras_builder.py").write_text("from tests.models.keras.networks import mlp as mine\n")

    model = build(of_builder("my_keras_builder:mine", tmp_path))

    assert model.row_dim == DIM


def not_a_model(schema, dim):
    return 7


def without_inputs(schema, dim):
    import keras

    return keras.Sequential([keras.layers.Dense(2)])


def _ending(*layers):
    """Builder of a network that ends with these layers, made by functions of `keras.layers`."""

    def build(schema, dim):
        import keras

        from tests.models.keras.networks import inputs_of

        inputs = inputs_of(schema, dim)
        x = keras.layers.Concatenate()(inputs)
        for make in layers:
            x = make(keras.layers)(x)
        return keras.Model(inputs, x)

    return build


normalized = _ending(lambda layers: layers.BatchNormalization(name="norm"), lambda layers: layers.Dense(2))
regularized = _ending(lambda layers: layers.Dense(2, kernel_regularizer="l2"))
probabilities = _ending(lambda layers: layers.Dense(2, activation="sigmoid", name="out"))
too_many = _ending(lambda layers: layers.Dense(3))
scaled = _ending(
    lambda layers: layers.Dense(4, activation="sigmoid"),
    lambda layers: layers.Rescaling(8.0, offset=-4.0),
    lambda layers: layers.Dense(2),
)
double = _ending(lambda layers: layers.Dense(2, dtype="float64", name="out"))
double_output = _ending(
    lambda layers: layers.Dense(2), lambda layers: layers.Activation("linear", dtype="float64", name="out")
)


def _two(layers):
    return layers.Dense(2)


def _sure(layers):
    return layers.Dense(2, activation="sigmoid", name="sure")


def _nested(*layers):
    """A model in a model."""

    def make(keras_layers):
        import keras

        return keras.Sequential([layer(keras_layers) for layer in layers])

    return make


def _operation(operation):
    """One of `keras.ops` or of `keras.activations`."""

    def make(layers):
        import keras

        return lambda x: operation(keras, x)

    return make


ENDINGS = {
    "an operation": (_two, _operation(lambda keras, x: keras.ops.sigmoid(x))),
    "an activation as a function": (_two, _operation(lambda keras, x: keras.activations.sigmoid(x))),
    "hard_sigmoid": (_two, _operation(lambda keras, x: keras.ops.hard_sigmoid(x))),
    "log_softmax": (_two, _operation(lambda keras, x: keras.ops.log_softmax(x))),
    "a layer of Softmax": (_two, lambda layers: layers.Softmax()),
    "a layer of Activation": (_two, lambda layers: layers.Activation("log_sigmoid")),
    "a layer as activation": (lambda layers: layers.Dense(2, activation=layers.Softmax()),),
    "a nested model": (_nested(_two, _sure),),
    "a nested model that only reshapes": (_sure, _nested(lambda layers: layers.Reshape((2,)))),
    "Reshape behind it": (_sure, lambda layers: layers.Reshape((2,))),
    "its type behind it": (_sure, lambda layers: layers.Activation("linear", dtype="float32")),
    "an operation of shape behind it": (
        lambda layers: layers.Dense(4, activation="sigmoid"),
        _operation(lambda keras, x: keras.ops.reshape(x, (-1, 2, 2))[:, 0]),
    ),
    "heads that are joined": (
        lambda layers: lambda x: layers.Concatenate()([layers.Dense(1)(x), layers.Dense(1, "sigmoid")(x)]),
    ),
    "a product of probabilities": (lambda layers: lambda x: layers.Multiply()([_sure(layers)(x)] * 2),),
    "a mean of probabilities": (lambda layers: lambda x: layers.Average()([_sure(layers)(x)] * 2),),
}


def ending(schema, dim, name):
    return _ending(*ENDINGS[name])(schema, dim)


@needs_tensorflow
@pytest.mark.parametrize("name", ENDINGS)
def test_outputs_that_are_probabilities_are_refused_however_they_are_made(name):
    settings = of_builder("tests.models.keras.test_keras_build:ending")

    with pytest.raises(InputError, match=r"output '\w+' ends with \w+, .* made of logits; leave .* out$"):
        build(settings.model_copy(update={"arguments": {"name": name}}))


def gated(schema, dim):
    import keras

    from tests.models.keras.networks import inputs_of

    inputs = inputs_of(schema, dim)
    x = keras.layers.Concatenate()(inputs)
    return keras.Model(inputs, keras.layers.Dense(2)(x) * keras.layers.Dense(2, "sigmoid")(x))


@needs_tensorflow
@pytest.mark.parametrize("builder", ["scaled", "gated"])
def test_a_sigmoid_that_logits_are_made_of_is_none_of_our_business(builder):
    assert build(of_builder(f"tests.models.keras.test_keras_build:{builder}")).order == (0,)


def assigning(schema, dim):
    """Keeps a weight that is trained within bounds by itself."""
    import keras

    class Bounded(keras.layers.Dense):
        def call(self, inputs):
            self.bias.assign(keras.ops.clip(self.bias, -1.0, 1.0))
            return super().call(inputs)

    return _ending(lambda layers: Bounded(2, name="bounded"))(schema, dim)


bounded = _ending(lambda layers: layers.Dense(2, kernel_constraint="non_neg", name="bounded"))


def untraceable(schema, dim):
    import keras

    class Reading(keras.layers.Layer):
        def call(self, inputs, training=False):
            return inputs if training else float(inputs[0, 0]) * inputs

        def compute_output_shape(self, shape):
            return shape

    return _ending(_two, lambda layers: Reading())(schema, dim)


half = _ending(lambda layers: layers.Dense(4, dtype="mixed_float16", name="half"), _two)
half_nested = _ending(_nested(lambda layers: layers.Dense(4, dtype="mixed_float16", name="half"), _two))
half_cast = _ending(_two, _operation(lambda keras, x: keras.ops.cast(x, "float16")))


@needs_tensorflow
def test_a_model_may_be_a_sequence_of_layers():
    one_column = ImpressionSchema(labels=("click",), ids={"item": "item"})

    model = build_keras_model(of_builder("tests.models.keras.test_keras_build:sequence"), one_column, 0, HOST)

    assert [one.name for one in model.inputs] == ["item"]


def sequence(schema, dim):
    import keras

    return keras.Sequential([keras.Input((dim,), name="item"), keras.layers.Dense(1)])


def wrong_names(schema, dim):
    import keras

    from tests.models.keras.networks import inputs_of

    inputs = inputs_of(schema, dim)
    x = keras.layers.Concatenate()(inputs)
    return keras.Model(inputs, [keras.layers.Dense(1, name=name)(x) for name in ("click", "like")])


def failing(schema, dim):
    import keras

    return keras.Model([], keras.layers.Dense(-3)(keras.Input((2,), name="user")))


@needs_tensorflow
@pytest.mark.parametrize(
    ("builder", "message"),
    [
        ("not_a_model", "must return a keras.Model, and gave int"),
        ("without_inputs", "has no declared inputs"),
        ("normalized", "changes 'norm/moving_mean' while it is trained, as BatchNormalization does"),
        ("assigning", "changes 'bounded/bias' by other ways than its gradient"),
        ("bounded", "weight 'bounded/kernel' has a constraint, which only Keras's own optimizers apply"),
        ("untraceable", "untraceable failed: "),
        ("regularized", "adds losses of its own .* training.optimizer.weight_decay"),
        ("probabilities", "output 'out' ends with sigmoid, .* leave that activation out"),
        ("too_many", r"output has the shape \(None, 3\), and there are 2 labels; give one output"),
        ("double", "weight 'out/kernel' is float64, but weights, like rows, are float32; leave out"),
        ("double_output", "float64, but logits are float32; give its last layer dtype='float32'"),
        ("half", "layer 'half' computes in float16, .* gradients .* take 'mixed_bfloat16'"),
        ("half_nested", "layer 'half' computes in float16"),
        ("half_cast", r"output '\w+' is float16, but logits are float32"),
        ("wrong_names", "outputs are 'click', 'like', and the labels 'click', 'buy'"),
        ("failing", "test_keras_build:failing failed: "),
    ],
)
def test_models_that_cannot_be_trained_here_are_refused_in_a_sentence(builder, message):
    with pytest.raises(InputError, match=message) as raised:
        build(of_builder(f"tests.models.keras.test_keras_build:{builder}"))

    assert "\n" not in str(raised.value)


@needs_tensorflow
def test_a_frozen_layer_stays_as_it_was_built():
    model = build(of_builder("tests.models.keras.test_keras_build:partly_frozen"))

    assert [name for name, _ in model.named_parameters()] == ["out/kernel", "out/bias"]


def partly_frozen(schema, dim):
    frozen = _ending(
        lambda layers: layers.Dense(3, name="given", trainable=False),
        lambda layers: layers.Dense(2, name="out"),
    )
    return frozen(schema, dim)


@needs_tensorflow
def test_a_process_that_has_keras_on_another_backend_is_told():
    load_tensorflow(1)
    load_keras("tensorflow")

    with pytest.raises(InputError, match=r"imported on 'tensorflow' .* set KERAS_BACKEND=torch before"):
        build(config("mlp").model_copy(update={"backend": "torch"}))


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if device_named(kind).has_own_memory])
def test_accelerators_are_refused_since_no_keras_model_has_run_there(backend, kind):
    settings = config("mlp").model_copy(update={"backend": backend})

    with pytest.raises(InputError, match=rf"device is '{kind}', .* CPU alone so far; set device to 'cpu'"):
        build_keras_model(settings, SCHEMA, 0, device_named(kind))

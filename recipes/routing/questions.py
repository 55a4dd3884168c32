"""What customers of a shop ask, by the tool that answers: wordings with slots, and questions of other things.

Of each tool the last wordings are tested alone: no model has seen them. `KEEP_LAST` says how many.
"""

from __future__ import annotations

KEEP_LAST = 2
NONE = "none"
"""The answer to a question that no tool is for."""

TOOLS: dict[str, tuple[str, ...]] = {
    "order_status": (
        "what is the status of {order}",
        "is {order} confirmed yet",
        "has {order} been processed",
        "how is {order} coming along",
        "did my payment for {order} go through so that it is placed",
        "can you check on {order} for me",
        "i wonder whether {order} went through",
        "any news on {order}",
    ),
    "track_package": (
        "where is the package of {order}",
        "track {order}",
        "when will {order} arrive",
        "the delivery of {order} is late, where is it",
        "is the parcel for {order} on its way",
        "which day does the courier bring {order}",
        "my parcel of {order} has not come",
        "i am waiting for the courier with {order}",
    ),
    "cancel_order": (
        "cancel {order}",
        "i do not want {order} any more",
        "please stop {order} before it is sent",
        "i ordered by mistake, take back {order}",
        "can {order} still be cancelled",
        "i changed my mind about {order}, do not send it",
        "call off {order}",
        "{order} was a mistake, drop it",
    ),
    "return_item": (
        "i want to return the {product}",
        "how do i send back the {product}",
        "the {product} does not fit, i want to give it back",
        "can i return a {product} that i have opened",
        "the {product} is not what i expected, how do i send it back",
        "start a return for the {product}",
        "i would like to give the {product} back",
        "where do i send the {product} that i do not like",
    ),
    "refund_status": (
        "when do i get my money back for {order}",
        "where is the refund of {order}",
        "i returned {order} and have no money yet",
        "has the refund for {order} been paid",
        "how long does the refund of {order} take",
        "my money for {order} has not come back",
        "i am still waiting to be paid back for {order}",
        "did you refund {order}",
    ),
    "find_product": (
        "do you sell a {product}",
        "show me a {product}",
        "i am looking for a {product}",
        "which {product} can you recommend",
        "i need a new {product}",
        "find me a good {product}",
        "what kinds of {product} do you carry",
        "help me choose a {product}",
    ),
    "product_price": (
        "how much is the {product}",
        "what does the {product} cost",
        "price of the {product}",
        "is the {product} on sale",
        "how expensive is the {product}",
        "what do you charge for the {product}",
        "tell me the price of a {product}",
        "what would i pay for the {product}",
    ),
    "product_stock": (
        "is the {product} in stock",
        "how many of the {product} are left",
        "when is the {product} available again",
        "the {product} is sold out, when does it come back",
        "can i get the {product} right now",
        "do you have the {product} in the warehouse",
        "is there any {product} left",
        "will the {product} be back in stock",
    ),
    "store_hours": (
        "when does the shop in {city} open",
        "what are the opening hours in {city}",
        "is your store in {city} open on sunday",
        "until when can i come to the shop in {city}",
        "how late is the {city} store open",
        "do you close at noon in {city}",
        "what time does the {city} shop close",
        "are you open in {city} tonight",
    ),
    "use_coupon": (
        "my code {coupon} does not work",
        "how do i use the coupon {coupon}",
        "apply {coupon} to my basket",
        "is the voucher {coupon} still valid",
        "the discount of {coupon} was not taken off",
        "where do i enter {coupon}",
        "can i still redeem {coupon}",
        "{coupon} is refused at the checkout",
    ),
    "warranty": (
        "the {product} broke, is that under warranty",
        "how long is the warranty of the {product}",
        "my {product} stopped working, can you repair it",
        "does the guarantee cover a {product} that fell down",
        "the {product} is defective, what now",
        "i need a repair for the {product}",
        "is my broken {product} covered",
        "who fixes a {product} that does not turn on",
    ),
    "change_address": (
        "send {order} to another address",
        "i have moved, change the address of {order}",
        "the street of {order} is wrong",
        "can {order} go to my office instead",
        "update where {order} is delivered",
        "i typed the wrong house number for {order}",
        "please deliver {order} to my neighbor",
        "{order} has my old address",
    ),
}

OTHERS = (
    "what is the weather in {city}",
    "tell me a joke about a {product}",
    "who won the match in {city}",
    "how do i cook rice",
    "translate good morning into french",
    "what is the capital of peru",
    "set an alarm for seven",
    "play some music",
    "how old is the universe",
    "write a poem about {city}",
    "what time is it in {city}",
    "are you a robot",
    "book a flight to {city}",
    "how do i tie a tie",
    "what is twelve times nine",
    "who wrote hamlet",
    "recommend a restaurant in {city}",
    "how tall is mount everest",
)
OTHERS_TESTED = (
    "is it going to snow tomorrow",
    "what should i name my dog",
    "spell accommodation",
    "how far is the moon",
    "call my mother",
    "which movies are on in {city}",
    "how do i get from the station to the museum in {city}",
    "turn off the lights",
    "what is the meaning of life",
    "who is the president of brazil",
    "convert ten miles to kilometers",
    "remind me to water the plants",
)

PRODUCTS = (
    "coffee machine", "rain jacket", "desk lamp", "running shoe", "phone case", "wool blanket",
    "bread knife", "garden hose", "tent", "backpack", "office chair", "water bottle",
    "electric kettle", "yoga mat", "headset", "mountain bike", "toaster", "winter coat",
    "baby stroller", "game console", "bluetooth speaker", "tea pot", "hair dryer", "steam iron",
    "drill", "ladder", "sleeping bag", "wrist watch", "fitness tracker", "rice cooker",
)  # fmt: skip
PRODUCTS_TESTED = (
    "vacuum cleaner", "picture frame", "hiking boot", "wall clock", "paint brush", "camping stove",
    "keyboard", "bird feeder", "shower curtain", "bicycle pump",
)  # fmt: skip
CITIES = (
    "bern", "lyon", "porto", "leeds", "turin", "ghent", "basel", "malaga", "graz", "kiel", "nantes",
    "verona", "bergen", "krakow", "cork",
)  # fmt: skip
CITIES_TESTED = ("utrecht", "aarhus", "bilbao", "tartu", "split")
BEFORE = (
    "hi, ", "hello, ", "please ", "hey ", "good morning, ", "quick question: ", "sorry, ", "um, ",
    "excuse me, ",
)  # fmt: skip
AFTER = (
    "?", " please", ", thanks", "!", " asap", "??", ", can you help", " thank you", ".",
)  # fmt: skip

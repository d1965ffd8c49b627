"""Every field of Google's generateContent and countTokens, and what becomes of it here.

From the request types of the SDK `google-genai` 3.4 and https://ai.google.dev/api/generate-content. Names may come in
camelCase or snake_case; `part` is a part wherever it may stand.
"""

from __future__ import annotations

from ..fields import Action, Field

MAPPED, IGNORED, REFUSED, SETTING = Action.MAPPED, Action.IGNORED, Action.REFUSED, Action.SETTING
PROVIDER = "a tool that the provider runs: `provider_tools`"
OF_KIND = "says more of a kind of part that is refused"
ONE_MODEL = "one model"
STATELESS = "the proxy keeps no conversation; send the contents"
TEXT_ONLY = "this model answers with text"
CLIENT = "the SDK's own; never sent"

FIELDS = (
    Field("model", IGNORED, "the path names it, and it is told back; the engine is asked for the session's"),
    Field("contents", MAPPED, "messages, in order; contents of the model that follow each other are one"),
    Field("contents[].role", MAPPED, "user, model; `function` as user, none as user"),
    Field("contents[].parts", MAPPED, "see `part`"),
    Field("systemInstruction", MAPPED, "the first message, of role system"),
    Field("systemInstruction.role", IGNORED, "it is the system's"),
    Field("systemInstruction.parts", MAPPED, "text; its parts stay parts"),
    Field("tools", MAPPED, "functions, in order"),
    Field("tools[].functionDeclarations", MAPPED, "functions"),
    Field("tools[].functionDeclarations[].name", MAPPED, "its name"),
    Field("tools[].functionDeclarations[].description", MAPPED, "its description"),
    Field(
        "tools[].functionDeclarations[].parameters",
        MAPPED,
        "as JSON Schema: types in lower case, `nullable` as a type, `propertyOrdering` left out",
        whole=True,
    ),
    Field("tools[].functionDeclarations[].parametersJsonSchema", MAPPED, "its parameters", whole=True),
    Field("tools[].functionDeclarations[].response", IGNORED, "the harness runs the function"),
    Field("tools[].functionDeclarations[].responseJsonSchema", IGNORED, "the harness runs the function"),
    Field("tools[].functionDeclarations[].behavior", IGNORED, "of the Live API"),
    Field("tools[].codeExecution", SETTING, PROVIDER),
    Field("tools[].computerUse", SETTING, PROVIDER),
    Field("tools[].enterpriseWebSearch", SETTING, PROVIDER),
    Field("tools[].exaAiSearch", SETTING, PROVIDER),
    Field("tools[].fileSearch", SETTING, PROVIDER),
    Field("tools[].googleMaps", SETTING, PROVIDER),
    Field("tools[].googleSearch", SETTING, PROVIDER),
    Field("tools[].googleSearchRetrieval", SETTING, PROVIDER),
    Field("tools[].mcpServers", SETTING, PROVIDER),
    Field("tools[].parallelAiSearch", SETTING, PROVIDER),
    Field("tools[].retrieval", SETTING, PROVIDER),
    Field("tools[].urlContext", SETTING, PROVIDER),
    Field("toolConfig", MAPPED, "see below"),
    Field("toolConfig.functionCallingConfig", MAPPED, "`tool_choice`"),
    Field(
        "toolConfig.functionCallingConfig.mode",
        MAPPED,
        "AUTO; ANY is `required`, marked `forced_tool`; NONE; VALIDATED as AUTO, since a grammar would force tokens",
    ),
    Field(
        "toolConfig.functionCallingConfig.allowedFunctionNames",
        MAPPED,
        "one with ANY: that function is forced; else only these are shown",
    ),
    Field(
        "toolConfig.functionCallingConfig.streamFunctionCallArguments",
        IGNORED,
        "arguments are told once they are whole and on the log",
    ),
    Field("toolConfig.retrievalConfig", IGNORED, "of the provider's tools"),
    Field("toolConfig.includeServerSideToolInvocations", IGNORED, "of the provider's tools"),
    Field("safetySettings", IGNORED, "nothing is filtered"),
    Field("cachedContent", REFUSED, STATELESS),
    Field("continuationToken", REFUSED, STATELESS),
    Field("generationOutputConfig", REFUSED, "replies are written to no other place"),
    Field("labels", IGNORED, "nothing is billed"),
    Field("serviceTier", IGNORED, "one tier"),
    Field("store", IGNORED, "every call is on the log"),
    Field("modelArmorConfig", IGNORED, "nothing is filtered"),
    Field("generateContentRequest", MAPPED, "of countTokens: a whole request", whole=True),
    # generationConfig
    Field("generationConfig", MAPPED, "see below"),
    Field("generationConfig.maxOutputTokens", MAPPED, "`max_completion_tokens`, bounded by the task's"),
    Field("generationConfig.temperature", MAPPED, "0 to 2; in effect only where the task allows it"),
    Field("generationConfig.topP", MAPPED, "as temperature"),
    Field("generationConfig.topK", MAPPED, "as temperature"),
    Field("generationConfig.stopSequences", MAPPED, "`stop`"),
    Field("generationConfig.candidateCount", MAPPED, "`n`"),
    Field("generationConfig.seed", MAPPED, "as temperature"),
    Field("generationConfig.presencePenalty", MAPPED, "as temperature"),
    Field("generationConfig.frequencyPenalty", MAPPED, "as temperature"),
    Field("generationConfig.responseLogprobs", MAPPED, "`logprobsResult` of the reply, without ids"),
    Field("generationConfig.logprobs", MAPPED, "0 to 20 others for each token"),
    Field(
        "generationConfig.responseMimeType",
        MAPPED,
        "text/plain; application/json is a `response_format`, text/x.enum a choice, both marked `grammar`",
    ),
    Field("generationConfig.responseSchema", MAPPED, "as a function's parameters", whole=True),
    Field("generationConfig.responseJsonSchema", MAPPED, "as it is", whole=True),
    Field("generationConfig.responseFormat", REFUSED, "use responseMimeType with a schema"),
    Field("generationConfig.responseModalities", MAPPED, "TEXT; others are refused"),
    Field("generationConfig.thinkingConfig", MAPPED, "see below"),
    Field("generationConfig.thinkingConfig.includeThoughts", MAPPED, "whether thoughts are shown"),
    Field(
        "generationConfig.thinkingConfig.thinkingBudget",
        MAPPED,
        "0: `enable_thinking` and `thinking` of the chat template off, others: on, unless `thinking_switch` is "
        "template; the number itself would force the tokens that end thinking",
    ),
    Field(
        "generationConfig.thinkingConfig.thinkingLevel",
        MAPPED,
        "thinking on, and `reasoning_effort`: low, medium, high, unless `thinking_switch` is template",
    ),
    Field("generationConfig.speechConfig", IGNORED, TEXT_ONLY),
    Field("generationConfig.imageConfig", IGNORED, TEXT_ONLY),
    Field("generationConfig.mediaResolution", IGNORED, "the engine's image processor decides"),
    Field("generationConfig.audioTimestamp", IGNORED, OF_KIND),
    Field("generationConfig.audioTranscriptionConfig", IGNORED, OF_KIND),
    Field("generationConfig.translationConfig", REFUSED, TEXT_ONLY),
    Field("generationConfig.enableAffectiveDialog", IGNORED, TEXT_ONLY),
    Field("generationConfig.enableEnhancedCivicAnswers", IGNORED, ONE_MODEL),
    Field("generationConfig.routingConfig", IGNORED, ONE_MODEL),
    Field("generationConfig.modelSelectionConfig", IGNORED, ONE_MODEL),
    Field("generationConfig.modelConfig", IGNORED, ONE_MODEL),
    # parts
    Field("part.text", MAPPED, "text; pieces of one text of the model's are put together"),
    Field("part.thought", MAPPED, "the text is `reasoning` of its message"),
    Field(
        "part.thoughtSignature",
        MAPPED,
        "ours holds what a client may lose: thinking, a call's id, the text of its arguments; others: "
        "`foreign_thinking` where no thought is shown beside it",
    ),
    Field("part.functionCall", MAPPED, "a tool call"),
    Field("part.functionCall.id", MAPPED, "its id; without one, that of its signature, else one made of its place"),
    Field("part.functionCall.name", MAPPED, "its name"),
    Field(
        "part.functionCall.args", MAPPED, "its arguments as JSON; unchanged ones as the model wrote them", whole=True
    ),
    Field("part.functionCall.partialArgs", REFUSED, "arguments are sent back whole"),
    Field("part.functionCall.willContinue", IGNORED, "a call is whole"),
    Field("part.functionResponse", MAPPED, "a `tool` message in its place"),
    Field("part.functionResponse.id", MAPPED, "`tool_call_id`; without one: the first open call of that name"),
    Field("part.functionResponse.name", MAPPED, "finds its call"),
    Field(
        "part.functionResponse.response",
        MAPPED,
        "`output` where there is nothing else, else all of it as JSON",
        whole=True,
    ),
    Field("part.functionResponse.parts", MAPPED, "images and text, after the output"),
    Field("part.functionResponse.parts[].inlineData", MAPPED, "as `part.inlineData`", whole=True),
    Field("part.functionResponse.parts[].fileData", SETTING, "as `part.fileData`"),
    Field("part.functionResponse.parts[].*", IGNORED, OF_KIND),
    Field("part.functionResponse.willContinue", IGNORED, "each response is one"),
    Field("part.functionResponse.scheduling", IGNORED, "of the Live API"),
    Field("part.inlineData", MAPPED, "text, or an `image_url` part with hash and position in the record"),
    Field("part.inlineData.data", MAPPED, "its bytes"),
    Field("part.inlineData.mimeType", MAPPED, "JPEG, PNG, GIF, WebP, or text; audio, video and PDF are refused"),
    Field("part.inlineData.displayName", IGNORED, "is not shown to the model"),
    Field("part.fileData", SETTING, "there is no Files API; an image the engine would fetch: `image_urls`"),
    Field("part.executableCode", SETTING, "a provider's tool in the history: `provider_tools`"),
    Field("part.codeExecutionResult", SETTING, "a provider's tool in the history: `provider_tools`"),
    Field("part.toolCall", SETTING, "a provider's tool in the history: `provider_tools`"),
    Field("part.toolResponse", SETTING, "a provider's tool in the history: `provider_tools`"),
    Field("part.mediaResolution", IGNORED, "the engine's image processor decides"),
    Field("part.mediaProcessing", IGNORED, OF_KIND),
    Field("part.videoMetadata", IGNORED, OF_KIND),
    Field("part.audioTranscription", IGNORED, OF_KIND),
    Field("part.audioMetadata", IGNORED, OF_KIND),
    Field("part.speechMetadata", IGNORED, OF_KIND),
    Field("part.documentMetadata", IGNORED, OF_KIND),
    Field("part.spreadsheetMetadata", IGNORED, OF_KIND),
    Field("part.partMetadata", IGNORED, "is not shown to the model"),
    # what an SDK calls configuration and keeps to itself
    Field("httpOptions", IGNORED, CLIENT),
    Field("shouldReturnHttpResponse", IGNORED, CLIENT),
    Field("automaticFunctionCalling", IGNORED, CLIENT),
    Field("automaticContinuation", IGNORED, CLIENT),
    # headers and query
    Field("header x-goog-api-key, Authorization", MAPPED, "the session's key; also `?key=`, or /s/KEY/ in the path"),
    Field("query alt", MAPPED, "`sse`: server-sent events; else a stream is one JSON array"),
)

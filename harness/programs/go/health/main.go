// Command health prints, for each object on standard input, what Flux, Helm 4 and Argo CD make of it.
//
// kstatus is Helm's and Flux's own library. Expressions are evaluated by Flux's CEL, in Flux's order. The Lua is
// that of Argo CD, with the libraries that Argo CD opens for a health check.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/interpreter"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	luajson "layeh.com/gopher-json"
)

type verdict struct {
	Kstatus string `json:"kstatus"`
	Message string `json:"message"`
	Flux    string `json:"flux"`
	ArgoCD  argo   `json:"argocd"`
}

type argo struct {
	Status  string `json:"status"`
	Message string `json:"message"`
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run takes the Flux expressions as JSON and the Lua script.
func run(arguments []string) error {
	if len(arguments) != 2 {
		return errors.New("usage: health FLUX-EXPRESSIONS-JSON LUA <objects.json")
	}
	var expressions map[string]string
	if err := json.Unmarshal([]byte(arguments[0]), &expressions); err != nil {
		return err
	}
	input := json.NewDecoder(os.Stdin)
	output := json.NewEncoder(os.Stdout)
	for {
		var raw json.RawMessage
		if err := input.Decode(&raw); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		found, err := judge(raw, expressions, arguments[1])
		if err != nil {
			return err
		}
		if err := output.Encode(found); err != nil {
			return err
		}
	}
}

func judge(raw json.RawMessage, expressions map[string]string, script string) (*verdict, error) {
	object := &unstructured.Unstructured{}
	if err := object.UnmarshalJSON(raw); err != nil {
		return nil, err
	}
	result, err := status.Compute(object)
	if err != nil {
		return nil, err
	}
	byExpression, err := evaluate(object, expressions)
	if err != nil {
		return nil, err
	}
	health, err := luaHealth(raw, script)
	if err != nil {
		return nil, err
	}
	return &verdict{string(result.Status), result.Message, byExpression, *health}, nil
}

// evaluate is Flux's RFC 0009: the generation first, then the expressions in this order.
func evaluate(object *unstructured.Unstructured, expressions map[string]string) (string, error) {
	observed, found, err := unstructured.NestedInt64(object.Object, "status", "observedGeneration")
	if err != nil {
		return "", err
	}
	if found && observed != object.GetGeneration() {
		return status.InProgressStatus.String(), nil
	}
	environment, err := cel.NewEnv()
	if err != nil {
		return "", err
	}
	fields, err := interpreter.NewActivation(object.Object)
	if err != nil {
		return "", err
	}
	for _, one := range []struct {
		name   string
		status status.Status
	}{
		{"inProgress", status.InProgressStatus},
		{"failed", status.FailedStatus},
		{"current", status.CurrentStatus},
	} {
		if expressions[one.name] == "" {
			continue
		}
		// As Flux does, parsed and not checked: a CRD may have any top-level field.
		parsed, issues := environment.Parse(expressions[one.name])
		if issues != nil && issues.Err() != nil {
			return "", issues.Err()
		}
		program, err := environment.Program(parsed)
		if err != nil {
			return "", err
		}
		result, _, err := program.Eval(fields)
		if err != nil {
			return "", err
		}
		if result.Value() == true {
			return one.status.String(), nil
		}
	}
	return status.InProgressStatus.String(), nil
}

func luaHealth(raw json.RawMessage, script string) (*argo, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for name, open := range map[string]lua.LGFunction{lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable} {
		state.Push(state.NewFunction(open))
		state.Push(lua.LString(name))
		state.Call(1, 0)
	}
	object, err := luajson.Decode(state, raw)
	if err != nil {
		return nil, err
	}
	state.SetGlobal("obj", object)
	if err := state.DoString(script); err != nil {
		return nil, err
	}
	encoded, err := luajson.Encode(state.Get(-1))
	if err != nil {
		return nil, err
	}
	health := &argo{}
	return health, json.Unmarshal(encoded, health)
}
